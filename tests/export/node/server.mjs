// A static server that can fail on purpose, and the browser, for the tests of the page and for its measurement.
import fs from "node:fs";
import http from "node:http";
import path from "node:path";
import { chromium } from "playwright-core";

const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript", ".svg": "image/svg+xml" };
const FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync";

export const launch = () =>
  chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: FLAGS.split(" ") });

/** Serve a folder on this machine. `faults` maps paths to "missing", "cut" or "damaged", or to a promise to wait for. */
export async function serve(folder, faults = new Map()) {
  const server = http.createServer(async (request, response) => {
    const name = new URL(request.url, "http://localhost").pathname.replace(/^\/$/, "/index.html");
    const file = path.join(folder, name);
    const fault = faults.get(name);
    if (fault instanceof Promise) await fault;
    if (fault === "missing" || !fs.existsSync(file)) return response.writeHead(404).end();
    const content = fs.readFileSync(file);
    if (fault === "damaged") content.fill(0, 5000, 5100);
    const type = TYPES[path.extname(file)] ?? "application/octet-stream";
    response.writeHead(200, { "content-type": type, "content-length": content.length });
    if (fault !== "cut") return response.end(content);
    response.write(content.subarray(0, content.length / 2), () => response.destroy());
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  const close = () => {
    server.closeAllConnections();
    server.close();
  };
  return { origin: `http://127.0.0.1:${server.address().port}`, close };
}
