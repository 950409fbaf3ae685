// Milliseconds of the page in headless Chromium, as JSON: node measure.mjs FOLDER ROUNDS; benchmarks/browser.py runs it.
import { launch, serve } from "./server.mjs";

const [folder, rounds] = process.argv.slice(2);
const QUESTIONS = ["read a file line by line", "run a function after some seconds", "join the parts of a path", "sort a list by a key"];
const SENTENCES = ["Raise an error if the file does not [MASK].", "Open the [MASK] and read the first [MASK]."];
const times = { cold: [], reload: [], search: [], fill: [] };

/** From the load of the page to the first answer, for a question that is typed while the page loads. */
async function firstAnswer(page, load) {
  const started = performance.now();
  await load();
  await page.fill("#question", QUESTIONS[0]);
  await page.keyboard.press("Enter");
  await page.locator("#answers li").first().waitFor();
  return performance.now() - started;
}

/** From the submission of a form to the frame that shows its answer. */
const answer = (page, form, field, status, text) =>
  page.evaluate(
    async ([form, field, status, text]) => {
      document.getElementById(field).value = text;
      const started = performance.now();
      document.getElementById(form).requestSubmit();
      while (!/\d ms/.test(document.getElementById(status).textContent)) await new Promise(requestAnimationFrame);
      return performance.now() - started;
    },
    [form, field, status, text],
  );

const { origin, close } = await serve(folder);
let version;
for (let round = 0; round < rounds; round++) {
  const browser = await launch(); // a new profile, which has stored nothing
  version = browser.version();
  const page = await browser.newPage();
  times.cold.push(await firstAnswer(page, () => page.goto(origin)));
  await page.getByText("The page now works offline too").waitFor();
  times.reload.push(await firstAnswer(page, () => page.reload()));
  for (const text of QUESTIONS) times.search.push(await answer(page, "search-form", "question", "search-status", text));
  for (const text of SENTENCES) times.fill.push(await answer(page, "fill-form", "sentence", "fill-status", text));
  await browser.close();
}
close();
console.log(JSON.stringify({ times, chromium: version }));
