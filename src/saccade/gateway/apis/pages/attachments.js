"use strict";
// The attachments of the question.
let attachments = [];  // {name, type, url, pixels}: url is what the server gets; pixels is an ImageBitmap, null for a URL

const isFile = (image) => image.url.startsWith("data:");

// A file's name goes into commands to paste: characters that a reader does not see are dropped.
const named = (name) => name.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "_").slice(-80) || "image.png";

async function addFiles(files) {
  fail("");
  for (const file of files) {
    const url = await new Promise((done) => {
      const reader = Object.assign(new FileReader(), { onload: () => done(reader.result), onerror: () => done("") });
      reader.readAsDataURL(file);
    });
    // A format that only the server can read is sent, too, and shown by its name.
    const pixels = await createImageBitmap(file).catch(() => null);
    const type = /^(image\/[\w.+-]+|application\/pdf)$/.test(file.type) ? file.type : "image/png";
    if (url) attachments.push({ name: named(file.name), type, url, pixels });
    else fail(`The browser cannot read ${named(file.name)}. Choose it again.`);
  }
  drawAttachments();
}

function addUrl(url) {
  if (!/^https?:\/\//i.test(url)) return fail("The URL of an image begins with http:// or https://.");
  fail("");
  $("url").value = "";
  attachments.push({ name: url, type: "", url, pixels: null });
  drawAttachments();
}

function drawAttachments() {
  $("attachments").replaceChildren(...attachments.map((image, index) => make("li", {}, ...preview(image),
    make("button", { type: "button", "aria-label": `Remove ${image.name}`, onclick: () => remove(index) }, "×"))));
  writeCode();
}

const preview = (image) => [
  // The page loads nothing from other servers: the server fetches an image with a URL.
  image.pixels ? make("img", { src: image.url, alt: image.name })
    : make("div", { class: "named" }, isFile(image) ? "no preview" : image.name),
  isFile(image) ? saved(image) : make("span", { class: "name" }, "by its URL")];

// The commands read a file of this name, which a pasted image or the example is not yet.
const saved = ({ name, url }) =>
  make("a", { class: "name", href: url, download: name, "aria-label": `Save ${name}` }, name);

function remove(index) {
  attachments.splice(index, 1);
  drawAttachments();
  ($("attachments").querySelectorAll("button")[Math.min(index, attachments.length - 1)] ?? $("file")).focus();
}

async function addExample() {
  const canvas = Object.assign(document.createElement("canvas"), { width: 256, height: 128 });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, 256, 128);
  context.fillStyle = "#c22a2a";
  context.font = "bold 72px Arial, 'DejaVu Sans', sans-serif";
  context.textAlign = "center";
  context.fillText(Array.from({ length: 3 }, () => "ACEFHKLPRTX"[Math.floor(Math.random() * 11)]).join(""), 128, 90);
  const blob = await new Promise((done) => canvas.toBlob(done));
  await addFiles([new File([blob], "example.png", { type: "image/png" })]);
}
