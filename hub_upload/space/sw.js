// Makes the page work offline. Small files are stored here at installation; the large ones are stored by app.js as it loads them.
// A new version replaces the old one at once: an open window has loaded all that it needs, and a window that is just loading
// finds no large file of another version, because their names have a hash.
const VERSION = "development"; // space.py writes a hash of the folder
const SHELL = `neobert-shell-${VERSION}`;
const SMALL = ["./", "app.js", "style.css", "icon.svg", "files.json", "vendor/ort.mjs", "vendor/tokenizers.mjs"];

self.addEventListener("install", (event) => {
  self.skipWaiting();
  const fresh = SMALL.map((path) => new Request(path, { cache: "reload" }));
  event.waitUntil(caches.open(SHELL).then((cache) => cache.addAll(fresh)));
});

self.addEventListener("activate", (event) => {
  const old = (names) => names.filter((name) => name.startsWith("neobert-shell-") && name !== SHELL);
  event.waitUntil(caches.keys().then((names) => Promise.all(old(names).map((name) => caches.delete(name)))));
});

self.addEventListener("fetch", (event) => {
  const { method, url, mode } = event.request;
  if (method !== "GET" || new URL(url).origin !== self.location.origin) return;
  const wanted = mode === "navigate" ? "./" : event.request; // the query of a link is not a part of the page
  event.respondWith(caches.match(wanted).then((stored) => stored ?? fetch(event.request)));
});
