// Answers of transformers.js as JSON: node answers.mjs FOLDER_OF_MODELS < jobs.json
// A job is {model, dtype, task, inputs, options} for a pipeline, or {model, dtype, auto, inputs} for an Auto class: texts for
// AutoTokenizer, and rows of input_ids and attention_mask for a model.
import * as hf from "@huggingface/transformers";
import fs from "node:fs";

hf.env.allowRemoteModels = false;
hf.env.localModelPath = process.argv[2];

const plain = (value) => JSON.parse(JSON.stringify(value, (_, part) => (typeof part === "bigint" ? Number(part) : part)));
const map = (values, change) => Object.fromEntries(Object.entries(values).map(([name, value]) => [name, change(value)]));
const tensor = (rows) => new hf.Tensor("int64", BigInt64Array.from(rows.flat(), BigInt), [rows.length, rows[0].length]);
const rows = (tensor) => plain(tensor.tolist());

async function answer({ model, dtype, auto, task, inputs, options }) {
  if (task) {
    const output = await (await hf.pipeline(task, model, { dtype }))(...inputs, options);
    return output.tolist ? rows(output) : plain(output);
  }
  const opened = await hf[auto].from_pretrained(model, { dtype });
  if (auto === "AutoTokenizer") return map(opened(inputs, { padding: true, truncation: true }), rows);
  return map(await opened(map(inputs, tensor)), rows);
}

const answers = [];
for (const job of JSON.parse(fs.readFileSync(0))) answers.push(await answer(job));
fs.writeFileSync(1, JSON.stringify(answers));
