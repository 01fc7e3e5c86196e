"use strict";
// The conversation as a file: JSON is the body of a request with every answer so far, Markdown is for readers.
const KINDS = { image: "Image", pdf: "PDF", video: "Video" };

const asJson = (turns) => `${JSON.stringify(body(turns), null, 2)}\n`;

const asMarkdown = (turns) => turns.map(({ question, attachments, answer }, index) => [
  `## Question ${index + 1}`, ...attachments.map(({ kind, name }) => `${KINDS[kind]}: ${name}`), question,
  `## Answer ${index + 1}`, answer,
].filter(Boolean).join("\n\n")).join("\n\n") + "\n";

function saveFile(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
