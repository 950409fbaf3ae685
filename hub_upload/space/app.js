// Downloads the model, the index and the tokenizer, then searches and fills masks. One mini model has both heads in one graph.
// The vectors of the documentation were computed before; only the question is embedded here.

const NUM_ANSWERS = 5;
const MASK = "[MASK]";
const STORE = "neobert-files"; // the large files, whose names have a hash; sw.js has the small ones
const byId = (id) => document.getElementById(id);
const megabytes = (bytes) => (bytes / 1e6).toFixed(1);

/** An error whose message is shown to the reader; `canRetry` offers to load the page again. */
class Problem extends Error {
  constructor(message, canRetry = true) {
    super(message);
    this.canRetry = canRetry;
  }
}

// 1. Download

/** Return the content of a file; what was stored on this device is not downloaded again. */
async function download({ path, name }, store, report) {
  const stored = await store?.match(path);
  const response = stored ?? (await fetched(path));
  const kept = stored ?? store?.put(path, response.clone());
  const counted = new TransformStream({
    transform(part, next) {
      report(part.length);
      next.enqueue(part);
    },
  });
  try {
    const unpacked = response.body.pipeThrough(counted).pipeThrough(new DecompressionStream("gzip")); // checks length and CRC
    return { content: await new Response(unpacked).arrayBuffer(), kept: Promise.resolve(kept) };
  } catch {
    await Promise.resolve(kept).catch(() => {});
    await store?.delete(path);
    throw new Problem(`The download of ${name} broke off, or the file is damaged.`);
  }
}

async function fetched(path) {
  const response = await fetch(path).catch(() => {
    throw new Problem(`${path} cannot be loaded: there is no connection to the server.`);
  });
  if (!response.ok) throw new Problem(`${path} is missing on the server (status ${response.status}).`);
  return response;
}

function imported(path) {
  return import(path).catch(() => {
    throw new Problem(`${path.slice(2)} is missing on the server, or the download broke off.`);
  });
}

/** Return the store of this origin; undefined where the browser allows none: the page then works, but not offline. */
async function openStore() {
  try {
    return await caches.open(STORE);
  } catch {
    return undefined;
  }
}

/** Download all files at once, and return their contents by name, and whether all of them are stored. */
async function downloadAll(files) {
  const total = files.reduce((sum, file) => sum + file.bytes, 0);
  let loaded = 0;
  const report = (bytes) => {
    loaded += bytes;
    byId("progress").value = loaded / total;
    byId("loading-text").textContent = `Loading the model: ${megabytes(loaded)} of ${megabytes(total)} MB`;
  };
  report(0);
  const store = await openStore();
  const results = await Promise.all(files.map((file) => download(file, store, report)));
  const contents = Object.fromEntries(files.map(({ name }, i) => [name, results[i].content]));
  const isStored = Promise.all(results.map(({ kept }) => kept)).then(
    () => removeOld(store, files),
    () => false, // the disk is full
  );
  return { contents, isStored };
}

async function removeOld(store, files) {
  const current = new Set(files.map(({ path }) => new URL(path, location.href).href));
  const keys = (await store?.keys()) ?? [];
  await Promise.all(keys.filter(({ url }) => !current.has(url)).map((key) => store.delete(key)));
  return Boolean(store);
}

// 2. Model

let ort, session, tokenizer, index, scales, vectors;

async function load() {
  if (typeof WebAssembly !== "object" || typeof DecompressionStream !== "function") {
    const words = "has no WebAssembly, or it is switched off, so the model cannot run here";
    throw new Problem(`This browser ${words}. Use a current Firefox, Chrome, Edge or Safari.`, false);
  }
  const files = await (await fetched("files.json")).json();
  const code = Promise.all([imported("./vendor/ort.mjs"), imported("./vendor/tokenizers.mjs")]);
  const [{ contents, isStored }, [runtime, { Tokenizer }]] = await Promise.all([downloadAll(files), code]);
  byId("loading-text").textContent = "Starting the model";
  await new Promise((painted) => setTimeout(painted)); // the next step holds the thread
  const json = (name) => JSON.parse(new TextDecoder().decode(contents[name]));
  ort = runtime;
  ort.env.wasm.wasmBinary = contents["runtime.wasm"];
  ort.env.wasm.numThreads = 1; // a static Space is not isolated from other origins, which threads need
  session = await ort.InferenceSession.create(new Uint8Array(contents["model.onnx"])).catch((error) => {
    throw new Problem(`The model could not be started: ${error.message ?? error}`);
  });
  const { tokenizer: rules, tokenizer_config: config } = json("tokenizer.json");
  tokenizer = new Tokenizer(rules, config);
  index = json("entries.json");
  const numVectors = index.starts.at(-1);
  scales = new Float32Array(contents["vectors.bin"], 0, numVectors);
  vectors = new Int8Array(contents["vectors.bin"], 4 * numVectors);
  return isStored;
}

let running = Promise.resolve();

/** Return one output of the graph for one text. Runs wait for one another: a session runs one text at a time. */
function run(ids, output) {
  const shape = [1, ids.length];
  const inputs = {
    input_ids: new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), shape),
    attention_mask: new ort.Tensor("int64", new BigInt64Array(ids.length).fill(1n), shape),
  };
  running = running.catch(() => {}).then(() => session.run(inputs, [output]));
  return running.then((outputs) => outputs[output].data);
}

/** Return the entries nearest to a question, best first, as [entry, cosine], and whether the question was cut. */
export async function search(question) {
  let { ids } = tokenizer.encode(question);
  const isCut = ids.length > index.question_tokens;
  if (isCut) ids = [...ids.slice(0, index.question_tokens - 1), ids.at(-1)];
  const embedding = await run(ids, "sentence_embedding");
  const length = Math.hypot(...embedding);
  const { entries, starts, bonuses } = index;
  const found = entries.map((entry, i) => {
    let best = -1;
    for (let row = starts[i]; row < starts[i + 1]; row++) {
      let product = 0;
      const first = row * embedding.length;
      for (let k = 0; k < embedding.length; k++) product += embedding[k] * vectors[first + k];
      best = Math.max(best, (product * scales[row]) / length);
    }
    return { entry, cosine: best, score: best + bonuses[i] };
  });
  return { found: found.sort((a, b) => b.score - a.score).slice(0, NUM_ANSWERS), isCut };
}

/** Return for each mask of a text its most likely tokens, best first, as {token, probability}. */
export async function fill(text) {
  const { ids } = tokenizer.encode(text);
  if (ids.length > index.max_tokens) {
    throw new Problem(`The text has ${ids.length} tokens, and the model reads ${index.max_tokens}. Shorten the text.`);
  }
  const logits = await run(ids, "logits");
  const size = logits.length / ids.length;
  const mask = tokenizer.token_to_id(MASK);
  const positions = [...ids.keys()].filter((i) => ids[i] === mask);
  return positions.map((position) => {
    const row = logits.subarray(position * size, (position + 1) * size);
    const largest = row.reduce((a, b) => Math.max(a, b));
    const sum = row.reduce((total, value) => total + Math.exp(value - largest), 0);
    const best = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, NUM_ANSWERS);
    return best.map((id) => ({ token: tokenizer.id_to_token(id), probability: Math.exp(row[id] - largest) / sum }));
  });
}

// 3. Page

function element(name, content = "", attributes = {}) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...[content].flat());
  return made;
}

function answerItem({ entry: [name, signature, sentence, rest, usage], cosine }) {
  const facts = [element("code", usage), element("span", `cosine ${cosine.toFixed(2)}`)];
  const parts = [element("h2", [name, element("span", signature)]), element("p", sentence || "(no docstring)")];
  parts.push(element("p", facts, { className: "facts" }));
  if (rest) parts.push(element("details", [element("summary", `More about ${name}`), element("pre", rest, { tabIndex: 0 })]));
  return element("li", parts);
}

async function showAnswers(question) {
  const started = performance.now();
  const { found, isCut } = await search(question);
  byId("answers").replaceChildren(...found.map(answerItem));
  const cut = isCut ? ` Only the first ${index.question_tokens} tokens of your question count.` : "";
  const took = `${Math.round(performance.now() - started)} ms`;
  const total = index.entries.length.toLocaleString("en");
  return `The nearest of ${total} entries, in ${took}. First: ${found[0].entry[0]}.${cut}`;
}

function wordList(words, title) {
  const items = words.map(({ token, probability }) => {
    const bar = element("span", "", { className: "bar" });
    bar.style.setProperty("--share", `${100 * probability}%`);
    return element("li", [token.replace(/^##/, "…"), bar, element("span", `${(100 * probability).toFixed(1)} %`)]);
  });
  return element("section", [element("h2", title), element("ol", items)]);
}

/** The parts of a text with the best word in the place of each mask; a token that begins with ## continues the word before it. */
function filledIn(text, masks) {
  const [first, ...others] = text.split(MASK);
  return others.reduce((parts, part, i) => {
    const { token } = masks[i][0];
    if (token.startsWith("##")) parts.push(parts.pop().trimEnd());
    return [...parts, element("mark", token.replace(/^##/, "")), part];
  }, [first]);
}

async function showWords(text) {
  const started = performance.now();
  const masks = await fill(text);
  byId("filled").replaceChildren(...filledIn(text, masks));
  const title = (i) => (masks.length > 1 ? `Mask ${i + 1} of ${masks.length}` : "Most likely words");
  byId("words").replaceChildren(...masks.map((words, i) => wordList(words, title(i))));
  const note = masks.length > 1 ? " Each is predicted while the others are still masked." : "";
  const best = masks.map(([{ token }]) => token.replace(/^##/, "…")).join(", ");
  return `Most likely: ${best}. ${Math.round(performance.now() - started)} ms.${note}`;
}

function checkQuestion(question) {
  if (!/[\p{L}\p{N}]/u.test(question)) return "Write a question in words first.";
}

function checkSentence(text) {
  if (!text.trim()) return `Write a sentence with ${MASK} in it first.`;
  if (!text.includes(MASK)) return `The sentence has no ${MASK}. Put it in the place of the missing word.`;
}

/** Answer when a form is submitted: check the text, wait for the model, show the results, and say so in the status line. */
function connect(form, field, status, results, check, show, loaded) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = field.value.replace(/\[mask\]/gi, MASK);
    const wrong = check(text);
    field.setAttribute("aria-invalid", String(Boolean(wrong)));
    results.forEach((part) => part.replaceChildren());
    status.textContent = wrong ?? "The model is not ready yet. The answer will appear here.";
    if (wrong) return field.focus();
    try {
      await loaded;
      status.textContent = await show(text);
    } catch (error) {
      status.textContent = error.message;
    }
  });
}

function connectTabs(tabs) {
  const choose = (chosen) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
  };
  for (const [i, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  }
}

function connectButtons() {
  for (const button of document.querySelectorAll("[data-for]")) {
    button.addEventListener("click", () => {
      const field = byId(button.dataset.for);
      field.value = button.textContent;
      field.form.requestSubmit();
    });
  }
  byId("insert").addEventListener("click", () => {
    const field = byId("sentence");
    field.setRangeText(MASK, field.selectionStart, field.selectionEnd, "end");
    field.focus();
  });
  byId("sentence").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("sentence").form.requestSubmit();
  });
  const fields = [byId("question"), byId("sentence")];
  for (const [i, field] of fields.entries()) field.value ||= history.state?.[i] ?? "";
  byId("retry").addEventListener("click", () => {
    history.replaceState(fields.map((field) => field.value), ""); // what was typed, for the page after the reload
    location.reload(); // a browser does not try a failed import twice
  });
}

async function begin() {
  const loaded = load();
  const [filled, words] = [byId("filled"), byId("words")];
  connect(byId("search-form"), byId("question"), byId("search-status"), [byId("answers")], checkQuestion, showAnswers, loaded);
  connect(byId("fill-form"), byId("sentence"), byId("fill-status"), [filled, words], checkSentence, showWords, loaded);
  connectTabs([byId("search-tab"), byId("fill-tab")]);
  connectButtons();
  const offline = registerWorker();
  try {
    const isStored = await loaded;
    byId("python").textContent = ` ${index.python}`;
    byId("state").textContent = "Ready.";
    byId("loading").hidden = true;
    if ((await isStored) && (await offline)) byId("state").textContent = "Ready. The page now works offline too.";
  } catch (error) {
    byId("loading").hidden = true;
    byId("problem").hidden = false;
    byId("problem-text").textContent = error.message;
    byId("retry").hidden = error.canRetry === false;
  }
}

/** Return whether the page is served offline from now on; the browser may refuse, as in a private window. */
async function registerWorker() {
  try {
    await navigator.serviceWorker.register("sw.js");
    await navigator.serviceWorker.ready;
    return true;
  } catch {
    return false;
  }
}

begin();
