"use strict";
// The same request as commands.
let language = "curl";

const quoted = (text) => `'${text.replaceAll("'", `'"'"'`)}'`;
const API = new URL("v1", location.href).href;

// The turns of the next request, or of the last one if no further question is begun.
function turnsToSend() {
  const next = { question: $("question").value, attachments, answer: "" };
  if (next.question || attachments.length || !turns.length) return [...turns, next];
  return [...turns.slice(0, -1), { ...turns.at(-1), answer: "" }];
}

// The request as JSON with a mark in place of each file's bytes: [what is around the marks], [the files].
function marked(body) {
  const mark = `file-${Math.random().toString(36).slice(2)}`;
  const files = [];
  const json = body((attachment) => {
    if (!isFile(attachment)) return attachment.url;
    files.push(attachment);
    return `data:${attachment.type};base64,${mark}`;
  });
  return [json.split(mark), files];
}

function curl() {
  const key = $("key").value ? ' -H "Authorization: Bearer $SACCADE_API_KEY"' : "";
  const call = `curl ${quoted(`${API}/chat/completions`)} -H 'Content-Type: application/json'${key} -d `;
  const [pieces, files] = marked((urlOf) => JSON.stringify(body(turnsToSend(), urlOf)));
  const [first, ...rest] = pieces.map(quoted);
  if (!rest.length) return call + first;
  // An argument may have 128 KiB, which a photo exceeds, so the body goes through a pipe.
  const written = files.map(({ name }, index) =>
    `base64 < ${quoted(name)} | tr -d '\\n'; printf %s ${rest[index]}; `);
  return `{ printf %s ${first}; ${written.join("")}} |\n  ${call}@-`;
}

// A value of JSON without true, false and null is one of Python.
function python() {
  const [pieces, files] = marked((urlOf) => JSON.stringify(body(turnsToSend(), urlOf).messages, null, 4));
  const [first, ...rest] = pieces;
  const read = ({ name }) => `base64.b64encode(Path(${JSON.stringify(name)}).read_bytes()).decode()`;
  const messages = first + files.map((file, index) => `" + ${read(file)}${rest[index].slice(1)}`).join("");
  const imports = [files.length && "import base64", $("key").value && "import os",
    files.length && "from pathlib import Path"];
  const key = $("key").value ? 'os.environ["SACCADE_API_KEY"]' : '"none"';
  return [...imports.filter(Boolean), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(API)}, api_key=${key})`, `messages = ${messages}`,
    "stream = client.chat.completions.create(", `    model=${JSON.stringify($("model").value)},`,
    "    messages=messages,", ...Object.entries(settings()).map(([name, value]) => `    ${name}=${value},`),
    "    stream=True,", ")", "for chunk in stream:",
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)'].join("\n");
}

function writeCode(chosen = language) {
  language = chosen;
  for (const name of ["curl", "python"]) $(name).setAttribute("aria-pressed", name === language);
  $("code").textContent = language === "curl" ? curl() : python();
}
