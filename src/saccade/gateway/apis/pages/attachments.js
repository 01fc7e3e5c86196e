"use strict";
// What the question comes with: images, PDFs and videos.
let attachments = [];  // {name, kind, type, url, thumbnail, numSeen, pixelsOf}: url is what the server gets, and
// thumbnail a data: URL, "" if there is none; for numSeen and pixelsOf see openers.js
let numOpening = 0;  // files that are being added; a question waits for them

const isFile = ({ url }) => url.startsWith("data:");

const VIDEO = /\.(mp4|m4v|mov|webm|mkv)$/i;
const TYPES = { image: /^image\/[\w.+-]+$/, pdf: /^application\/pdf$/, video: /^video\/[\w.+-]+$/ };
const USUAL = { image: "image/png", pdf: "application/pdf", video: "video/mp4" };

function kindOf({ type, name }) {
  if (TYPES.pdf.test(type) || /\.pdf$/i.test(name)) return "pdf";
  return TYPES.video.test(type) || VIDEO.test(name) ? "video" : "image";
}

// A file's name goes into commands to paste: characters that a reader does not see are dropped.
const named = (name) => name.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "_").slice(-80) || "image.png";

async function addFiles(files) {
  fail("");
  for (const file of files) {
    const name = named(file.name);
    setOpening(1, `Opening ${name} …`);
    try {
      attachments.push(await attachmentOf(file, name));
    } catch (error) {
      fail(`${name}: ${error.message}`);
    }
    setOpening(-1, "");
  }
  drawAttachments();
}

async function attachmentOf(file, name) {
  const kind = kindOf(file);
  const url = await dataUrl(file);
  const opened = await OPENERS[kind](file);
  const type = TYPES[kind].test(file.type) ? file.type : USUAL[kind];
  return { name, kind, type, url, thumbnail: thumbnailOf(await opened.pixelsOf(0)), ...opened };
}

const dataUrl = (file) => new Promise((done, refuse) => {
  const reader = Object.assign(new FileReader(), { onload: () => done(reader.result),
    onerror: () => refuse(new Error("The browser cannot read the file. Choose it again.")) });
  reader.readAsDataURL(file);
});

function setOpening(more, text) {
  numOpening += more;
  show($("opening"), text);
}

// Returns whether the URL was added.
function addUrl(url) {
  if (!/^https?:\/\//i.test(url) || !URL.canParse(url)) {
    fail("A URL begins with http:// or https://.");
    return false;
  }
  fail("");
  $("url").value = "";
  const kind = VIDEO.test(new URL(url).pathname) ? "video" : "image";
  attachments.push({ name: url, kind, type: "", url, thumbnail: "", ...UNSEEN });
  drawAttachments();
  return true;
}

function drawAttachments() {
  $("attachments").replaceChildren(...attachments.map((attachment, index) => make("li", {}, ...preview(attachment),
    make("button", { type: "button", "aria-label": `Remove ${attachment.name}`, onclick: () => remove(index) }, "×"))));
  writeCode();
}

const preview = (attachment) => [
  // The page loads nothing from other servers: the server fetches what has a URL.
  attachment.thumbnail ? make("img", { src: attachment.thumbnail, alt: attachment.name })
    : make("div", { class: "named" }, isFile(attachment) ? "no preview" : attachment.name),
  isFile(attachment) ? saved(attachment) : make("span", { class: "name" }, "by its URL"),
  attachment.numSeen > 1 ? make("span", { class: "name" }, count(attachment.numSeen, "page")) : ""];

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
