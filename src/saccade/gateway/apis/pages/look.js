"use strict";
// Shared by all pages. Text of servers, models and files becomes text nodes, never HTML.
const $ = (id) => document.getElementById(id);

// A child may be a list of children, of any length.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) element.append(child ?? "");
  return element;
}

function show(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

const table = (heads, rows) => make("table", {},
  make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))),
  make("tbody", {}, rows.map((cells) => make("tr", {}, cells.map((cell) => make("td", {}, cell))))));

const stored = (storage, name) => { try { return storage.getItem(name) ?? ""; } catch { return ""; } };
const store = (storage, name, value) => { try { storage.setItem(name, value); } catch { /* private window */ } };

// The key stays in this tab.
function keepKey(field, onChange) {
  field.value = stored(sessionStorage, field.id);
  field.addEventListener("change", () => { store(sessionStorage, field.id, field.value); onChange(); });
}

// Returns an error's sentence. A server's error has {"error": {"message"}}.
async function sentence(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return `The server answered with status ${response.status}.`; }
}
const UNREACHED = "The server does not answer. Check that it still runs, then try again.";

{
  const root = document.documentElement;
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { $("theme").textContent = isDark() ? "Light" : "Dark"; };
  const theme = stored(localStorage, "theme");
  if (theme) root.dataset.theme = theme;
  name();
  $("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store(localStorage, "theme", root.dataset.theme);
    name();
  });
}
