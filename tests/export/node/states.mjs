// Token states of transformers.js, for benchmarks/runtimes.py: node states.mjs FOLDER DTYPE NUM_THREADS
// A line of the input is a batch as JSON; the answer is its states as float32.
import * as hf from "@huggingface/transformers";
import path from "node:path";
import readline from "node:readline";

const [folder, dtype, threads] = process.argv.slice(2);
hf.env.allowRemoteModels = false;
hf.env.localModelPath = `${path.dirname(folder)}/`;
const options = { dtype, session_options: { intraOpNumThreads: Number(threads) } };
const model = await hf.AutoModel.from_pretrained(path.basename(folder), options);
const tensor = (rows) => new hf.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);

for await (const line of readline.createInterface({ input: process.stdin })) {
  const batch = Object.entries(JSON.parse(line)).map(([name, rows]) => [name, tensor(rows)]);
  const { data } = (await model(Object.fromEntries(batch))).last_hidden_state;
  process.stdout.write(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
}
