"use strict";
// The same request as commands.
let language = "curl";

const quoted = (text) => `'${text.replaceAll("'", `'"'"'`)}'`;
const API = new URL("v1", location.href).href;

function curl() {
  const key = $("key").value ? ' -H "Authorization: Bearer $SACCADE_API_KEY"' : "";
  const call = `curl ${quoted(`${API}/chat/completions`)} -H 'Content-Type: application/json'${key} -d `;
  const mark = `file-${Math.random().toString(36).slice(2)}`;
  const json = JSON.stringify(body((image) => isFile(image) ? `data:${image.type};base64,${mark}` : image.url));
  const [first, ...rest] = json.split(mark).map(quoted);
  if (!rest.length) return call + first;
  // An argument may have 128 KiB, which a photo exceeds, so the body goes through a pipe.
  const files = images.filter(isFile).map(({ name }, index) =>
    `base64 < ${quoted(name)} | tr -d '\\n'; printf %s ${rest[index]}; `);
  return `{ printf %s ${first}; ${files.join("")}} |\n  ${call}@-`;
}

// A string of JSON is a string of Python.
function python() {
  const hasFiles = images.some(isFile);
  const read = (image) => `base64.b64encode(Path(${JSON.stringify(image.name)}).read_bytes()).decode()`;
  const urls = images.map((image) =>
    isFile(image) ? `"data:${image.type};base64," + ${read(image)}` : JSON.stringify(image.url));
  const parts = urls.map((url) => `{"type": "image_url", "image_url": {"url": ${url}}}`);
  if ($("question").value) parts.push(`{"type": "text", "text": ${JSON.stringify($("question").value)}}`);
  const system = $("system").value ? `{"role": "system", "content": ${JSON.stringify($("system").value)}}, ` : "";
  const imports = [hasFiles && "import base64", $("key").value && "import os", hasFiles && "from pathlib import Path"];
  const key = $("key").value ? 'os.environ["SACCADE_API_KEY"]' : '"none"';
  return [...imports.filter(Boolean), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(API)}, api_key=${key})`,
    "content = [", ...parts.map((part) => `    ${part},`), "]",
    "stream = client.chat.completions.create(", `    model=${JSON.stringify($("model").value)},`,
    `    messages=[${system}{"role": "user", "content": content}],`, "    stream=True,", ")", "for chunk in stream:",
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)'].join("\n");
}

function writeCode(chosen = language) {
  language = chosen;
  for (const name of ["curl", "python"]) $(name).setAttribute("aria-pressed", name === language);
  $("code").textContent = language === "curl" ? curl() : python();
}

async function copy() {
  let isCopied = true;
  try {
    await navigator.clipboard.writeText($("code").textContent);
  } catch {  // the clipboard needs https or a local address
    getSelection().selectAllChildren($("code"));
    isCopied = document.execCommand("copy");
  }
  $("copied").textContent = $("copy").textContent = isCopied ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { $("copy").textContent = "Copy"; $("copied").textContent = ""; }, 2000);
}
