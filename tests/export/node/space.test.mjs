// The page of hub_upload/space in headless Chromium, with real clicks and typing: FOLDER=... WANTED=... node --test space.test.mjs
// FOLDER is what hub_upload/space.py wrote, WANTED a JSON file with questions and the names and cosines that PyTorch finds.
import assert from "node:assert/strict";
import fs from "node:fs";
import { after, afterEach, before, test } from "node:test";
import { launch, serve } from "./server.mjs";

const FOLDER = process.env.FOLDER;
const AXE = fs.readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
const QUESTION = "split a path into its folder and its file";

const pathOf = (name) => JSON.parse(fs.readFileSync(`${FOLDER}/files.json`)).find((file) => file.name === name).path;
const MODEL = pathOf("model.onnx");
const faults = new Map();
let browser, server;

before(async () => {
  server = await serve(FOLDER, faults);
  browser = await launch();
});

after(async () => {
  await browser?.close();
  server.close();
});

afterEach(() => faults.clear());

/** Open the page in a new profile, run the steps, and check that nothing left the host and nothing was logged. */
async function visit(steps, { profile = {}, prepare, mayLog = false } = {}) {
  const context = await browser.newContext(profile);
  context.setDefaultTimeout(180_000);
  const page = await context.newPage();
  const problems = [];
  if (prepare) await page.addInitScript(prepare);
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("console", (message) => mayLog || problems.push(message.text()));
  context.on("request", (request) => request.url().startsWith(`${server.origin}/`) || problems.push(request.url()));
  await page.goto(server.origin);
  try {
    await steps(page, context);
  } finally {
    await context.close();
  }
  assert.deepEqual(problems, []);
}

const ready = (page) => page.getByText("The page now works offline too").waitFor();
const answers = (page) => page.locator("#answers h2").allTextContents();
const words = (page) => page.locator("#words li span:first-child").allTextContents();
const said = (page, id, text) => page.locator(`#${id}`).getByText(text).waitFor();

async function search(page, question) {
  await page.getByLabel("What do you want Python to do?").fill(question);
  await page.getByRole("button", { name: "Search", exact: true }).click();
  await page.locator("#answers li").first().waitFor();
}

async function fill(page, text) {
  await page.getByRole("tab", { name: "Fill in a word" }).click();
  await page.getByLabel("A sentence with [MASK]").fill(text);
  await page.getByRole("button", { name: "Fill in", exact: true }).click();
}

async function violations(page) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  return violations.map(({ id, nodes }) => [id, nodes[0].html]);
}

test("a search finds the function, and its docstring can be opened", () =>
  visit(async (page) => {
    await search(page, QUESTION);
    assert.match((await answers(page))[0], /^os\.path\.split\(/);
    await page.getByText("More about os.path.split", { exact: true }).click();
    assert.ok(await page.locator("#answers pre").first().isVisible());
    await said(page, "search-status", "First: os.path.split.");
  }));

test("the page finds what PyTorch finds, with nearly its cosines", () =>
  visit(async (page) => {
    await ready(page);
    for (const [question, wanted] of Object.entries(JSON.parse(fs.readFileSync(process.env.WANTED)))) {
      const { found } = await page.evaluate(async (text) => (await import("./app.js")).search(text), question);
      assert.equal(found[0].entry[0], wanted[0][0]);
      assert.ok(Math.abs(found[0].cosine - wanted[0][1]) < 0.02, question); // int8 weights and int8 vectors
    }
  }));

test("one mask is filled, and several masks are filled one by one", () =>
  visit(async (page) => {
    await fill(page, "Raise an error if the file does not [MASK].");
    await said(page, "filled", "Raise an error if the file does not exist.");
    assert.equal((await words(page)).length, 5);
    await fill(page, "Open the [mask] and read the first [MASK].");
    await page.getByRole("heading", { name: "Mask 2 of 2" }).waitFor();
    assert.equal((await words(page)).length, 10);
    await said(page, "fill-status", "Each is predicted while the others are still masked");
  }));

test("the page works without the server once it is loaded", () =>
  visit(
    async (page, context) => {
      await ready(page);
      for (const name of fs.readdirSync(FOLDER, { recursive: true })) faults.set(`/${name}`, "missing");
      await context.setOffline(true);
      await page.reload();
      await search(page, QUESTION);
      assert.match((await answers(page))[0], /^os\.path\.split\(/);
    },
    { mayLog: true }, // the browser looks for a new service worker, and finds none
  ));

test("where the browser stores nothing, the page works and does not promise to work offline", () =>
  visit(
    async (page) => {
      await search(page, QUESTION);
      assert.equal(await page.textContent("#state"), "Ready.");
    },
    { prepare: () => delete globalThis.caches },
  ));

test("the keyboard alone reaches both tools, and the focus is visible", () =>
  visit(async (page) => {
    const focused = () => page.evaluate(() => [document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]);
    const press = async (...keys) => {
      for (const key of keys) await page.keyboard.press(key);
    };
    await press("Tab");
    assert.deepEqual(await focused(), ["search-tab", "solid"]);
    await press("Tab");
    assert.deepEqual(await focused(), ["question", "solid"]);
    await page.keyboard.type(QUESTION);
    await press("Enter");
    await page.locator("#answers li").first().waitFor();
    await press("Shift+Tab", "ArrowRight");
    assert.deepEqual(await focused(), ["fill-tab", "solid"]);
    await press("Tab");
    await page.keyboard.type("The file does not ");
    await press("Tab", "Enter"); // the button that inserts the mask, which returns to the text
    assert.deepEqual(await focused(), ["sentence", "solid"]);
    await press("Enter");
    await page.locator("#words li").first().waitFor();
    assert.equal(await page.inputValue("#sentence"), "The file does not [MASK]");
  }));

test("texts that cannot be answered give a sentence that says why", () =>
  visit(async (page) => {
    await ready(page);
    const submit = page.getByRole("button", { name: "Search", exact: true });
    await submit.click();
    await said(page, "search-status", "Write a question in words first.");
    await page.fill("#question", "?! …");
    await submit.click();
    await said(page, "search-status", "Write a question in words first.");
    await search(page, "read the lines of a file ".repeat(2000));
    await said(page, "search-status", "Only the first 64 tokens of your question count.");
    await fill(page, "  ");
    await said(page, "fill-status", "Write a sentence with [MASK] in it first.");
    await fill(page, "No word is missing.");
    await said(page, "fill-status", "The sentence has no [MASK]. Put it in the place of the missing word.");
    assert.equal(await page.getAttribute("#sentence", "aria-invalid"), "true");
    await fill(page, `${"word ".repeat(600)}[MASK]`);
    await said(page, "fill-status", /The text has 603 tokens, and the model reads 512\. Shorten the text\./);
    assert.equal(await page.getAttribute("#sentence", "aria-invalid"), "false");
  }));

test("a question that is asked while the model loads is answered when it is ready", () => {
  let release;
  faults.set(`/${MODEL}`, new Promise((resolve) => (release = resolve)));
  return visit(async (page) => {
    const bar = page.getByRole("progressbar", { name: "Loading the model" });
    await bar.waitFor();
    await page.fill("#question", QUESTION);
    await page.keyboard.press("Enter");
    await said(page, "search-status", "The model is not ready yet. The answer will appear here.");
    await page.waitForFunction(() => document.getElementById("progress").value > 0);
    assert.ok((await bar.evaluate((element) => element.value)) < 1);
    assert.match(await page.textContent("#loading-text"), /^Loading the model: \d+\.\d of \d+\.\d MB$/);
    release();
    await page.locator("#answers li").first().waitFor();
    assert.ok(await bar.isHidden());
  });
});

for (const [fault, file, message] of [
  ["missing", MODEL, `${MODEL} is missing on the server (status 404).`],
  ["missing", "vendor/ort.mjs", "vendor/ort.mjs is missing on the server, or the download broke off."],
  ["cut", MODEL, "The download of model.onnx broke off, or the file is damaged."],
  ["damaged", pathOf("vectors.bin"), "The download of vectors.bin broke off, or the file is damaged."],
]) {
  test(`a file that is ${fault} is named, and a second try works: ${file}`, async () => {
    faults.set(`/${file}`, fault);
    await visit(
      async (page) => {
        await page.getByRole("alert").getByText(message).waitFor();
        assert.deepEqual(await violations(page), []);
        await page.fill("#question", QUESTION);
        await page.keyboard.press("Enter");
        await said(page, "search-status", message);
        faults.clear();
        await page.getByRole("button", { name: "Try again" }).click();
        await page.getByRole("alert").waitFor({ state: "hidden" });
        assert.equal(await page.inputValue("#question"), QUESTION); // what was typed is still there
        await search(page, QUESTION);
        assert.ok(await page.getByRole("alert").isHidden());
      },
      { mayLog: true }, // the browser logs the failed request
    );
  });
}

test("a browser without WebAssembly is told so, without a button that cannot help", () =>
  visit(
    async (page) => {
      await page.getByRole("alert").getByText("This browser has no WebAssembly").waitFor();
      assert.ok(await page.getByRole("button", { name: "Try again" }).isHidden());
    },
    { prepare: () => delete globalThis.WebAssembly },
  ));

test("the page needs no isolation from other origins: it runs in one thread", () =>
  visit(async (page) => {
    await ready(page);
    const state = await page.evaluate(async () => [crossOriginIsolated, (await import("./vendor/ort.mjs")).env.wasm.numThreads]);
    assert.deepEqual(state, [false, 1]);
  }));

for (const colorScheme of ["light", "dark"]) {
  test(`at the width of a telephone, in ${colorScheme} colours, nothing is cut and axe finds no fault`, () =>
    visit(
      async (page) => {
        const check = async () => {
          assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 360);
          assert.deepEqual(await violations(page), []);
        };
        await check();
        await search(page, QUESTION);
        await page.locator("summary").first().click();
        await check();
        await fill(page, "Open the [MASK] and read the first [MASK].");
        await page.locator("#words li").first().waitFor();
        await check();
      },
      { profile: { colorScheme, viewport: { width: 360, height: 740 }, reducedMotion: "reduce" } },
    ));
}
