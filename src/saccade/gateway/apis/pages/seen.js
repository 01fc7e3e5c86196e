"use strict";
// What the model saw: each image with its patches, and the boxes that the answer names.
let drawing = 0;  // the number of the last drawing: a page of a PDF may come after another image was chosen

// Returns the attachment, and its page or 0, of each of *num* images that the server reports.
function partsOf(sent, num) {
  const parts = sent.flatMap((attachment) =>
    Array.from({ length: attachment.numSeen }, (_, index) => ({ attachment, index })));
  // What comes by its URL may be a PDF, whose pages were not counted here.
  return parts.length === num ? parts : Array(num).fill(null);
}

// *coordinates* are those of the model's boxes.
function showSeen(sent, seen, answer = "", coordinates = undefined) {
  const parts = partsOf(sent, seen.length);
  const select = (index) => {
    [...$("which").children].forEach((button, other) => button.setAttribute("aria-pressed", other === index));
    return drawSeen(parts[index], seen[index], placedBoxes(answer, coordinates, seen[index]), seen.length > 1);
  };
  $("which").replaceChildren(...parts.map((part, index) =>
    make("button", { type: "button", class: "small", onclick: () => select(index) }, shortTitle(part, index))));
  $("which").hidden = seen.length < 2;
  $("nothing").hidden = seen.length > 0;
  $("canvas").hidden = $("caption").hidden = $("boxes").hidden = !seen.length;
  drawing += 1;
  if (seen.length) select(0);
}

function shortTitle(part, index) {
  if (part?.attachment.kind === "pdf") return `Page ${part.index + 1}`;
  return `${part?.attachment.kind === "video" ? "Video" : "Image"} ${index + 1}`;
}

function titleOf(part) {
  if (!part) return "The image";
  return part.attachment.kind === "pdf" ? `${part.attachment.name}, page ${part.index + 1}` : part.attachment.name;
}

async function drawSeen(part, seen, boxes, hasOthers) {
  const number = drawing += 1;
  const pixels = await part?.attachment.pixelsOf(part.index).catch(() => null) ?? null;
  if (number !== drawing) return;
  const { width, height, patch, frames } = seen;
  const side = frames ? 0 : Math.sqrt(width / patch * (height / patch) / seen.tokens);  // of a token, in patches
  const areSquares = side > 1 && Number.isInteger(side);
  const scale = Math.max(1, Math.floor(1024 / Math.max(width, height)));  // small images enlarge without blur
  const small = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  small.imageSmoothingQuality = "high";
  if (pixels) small.drawImage(pixels, 0, 0, width, height);
  const canvas = Object.assign($("canvas"), { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small.canvas, 0, 0, canvas.width, canvas.height);
  grid(context, patch * scale, Math.max(1, canvas.width / 900), "rgb(128 128 128 / .55)");
  if (areSquares) grid(context, patch * scale * side, Math.max(2, canvas.width / 450), "rgb(11 138 124 / .85)");
  // The boxes of a video belong to its times, which the page does not show.
  const shown = frames ? [] : boxes;
  drawBoxes(context, shown);
  $("caption").textContent = captionOf(titleOf(part), seen, areSquares ? side : 0, pixels !== null);
  listBoxes(shown, seen, hasOthers);
  canvas.setAttribute("aria-label", `${titleOf(part)} with its grid of patches`);
}

function captionOf(title, { width, height, patch, tokens, cached, frames }, side, isDrawn) {
  const [columns, rows] = [width / patch, height / patch];
  const areWhole = Number.isInteger(columns) && Number.isInteger(rows);
  const cells = `${areWhole ? `${columns} × ${rows} ` : ""}patches of ${patch} pixels`;
  const each = side ? `, ${side} × ${side} patches each` : "";
  const kept = cached ? "All were cached." : "They were computed for this request.";
  const first = isDrawn ? "; the video's first is drawn" : "";
  const ofVideo = frames ? ` The model saw ${count(frames, "frame")}${first}.` : "";
  const drawn = isDrawn ? "" : " The browser has no preview of it, so only the patches are drawn.";
  return `${title}: ${width} × ${height} pixels: ${cells}. ${count(tokens, "token")}${each}. ${kept}${ofVideo}${drawn}`;
}

// The boxes as text, in pixels of what the model saw.
function listBoxes(boxes, { width, height }, hasOthers) {
  const pixels = (sides) => sides.map((side, index) => Math.round(side * (index % 2 ? height : width)));
  const items = boxes.map(({ label, sides }) => {
    const [left, top, right, bottom] = pixels(sides);
    return make("li", {}, `${label || "no name"}: from ${left}, ${top} to ${right}, ${bottom}`);
  });
  $("boxes").hidden = !boxes.length;
  const which = hasOthers ? " The answer may mean another image: its boxes are drawn on each." : "";
  const heading = make("p", {}, `Boxes of the answer, in pixels of this size.${which}`);
  $("boxes").replaceChildren(heading, make("ol", {}, items));
}

function grid(context, step, line, style) {
  const { width, height } = context.canvas;
  context.beginPath();
  for (let x = 0; x <= width; x += step) { context.moveTo(x, 0); context.lineTo(x, height); }
  for (let y = 0; y <= height; y += step) { context.moveTo(0, y); context.lineTo(width, y); }
  context.lineWidth = line;
  context.strokeStyle = style;
  context.stroke();
}
