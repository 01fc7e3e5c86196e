"use strict";
// What the model saw.

// Every page of a PDF is an image of its own; the pages of several PDFs cannot be told apart.
function byPages(attachments, num) {
  const isPdf = (image) => image.type === "application/pdf";
  const numPdfs = attachments.filter(isPdf).length;
  const pages = Array(Math.max(0, num - attachments.length + numPdfs));
  const shown = attachments.flatMap((image) => isPdf(image) ? pages.fill(image) : [image]);
  return shown.length === num ? shown : [];
}

function showSeen(sent, seen) {
  const shown = byPages(sent, seen.length);
  const select = (index) => {
    [...$("which").children].forEach((button, other) => button.setAttribute("aria-pressed", other === index));
    drawSeen(shown[index], seen[index]);
  };
  $("which").replaceChildren(...seen.map((_, index) =>
    make("button", { type: "button", class: "small", onclick: () => select(index) }, `Image ${index + 1}`)));
  $("which").hidden = seen.length < 2;
  $("nothing").hidden = seen.length > 0;
  $("canvas").hidden = $("caption").hidden = !seen.length;
  if (seen.length) select(0);
}

function drawSeen(image, { width, height, patch, tokens, cached }) {
  const [columns, rows] = [width / patch, height / patch];
  const side = Math.sqrt(columns * rows / tokens);  // of a token, in patches
  const areSquares = side > 1 && Number.isInteger(side);
  const scale = Math.max(1, Math.floor(1024 / Math.max(width, height)));  // small images enlarge without blur
  const small = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  small.imageSmoothingQuality = "high";
  if (image?.pixels) small.drawImage(image.pixels, 0, 0, width, height);
  const canvas = Object.assign($("canvas"), { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small.canvas, 0, 0, canvas.width, canvas.height);
  grid(context, patch * scale, Math.max(1, canvas.width / 900), "rgb(128 128 128 / .55)");
  if (areSquares) grid(context, patch * scale * side, Math.max(2, canvas.width / 450), "rgb(11 138 124 / .85)");
  const areWhole = Number.isInteger(columns) && Number.isInteger(rows);
  const cells = `${areWhole ? `${columns} × ${rows} ` : ""}patches of ${patch} pixels`;
  const each = areSquares ? `, ${side} × ${side} patches each` : "";
  const kept = cached ? "All were cached." : "They were computed for this request.";
  const drawn = image?.pixels ? "" : " The browser has no preview of it, so only the patches are drawn.";
  const size = `${width} × ${height} pixels`;
  $("caption").textContent = `${size}: ${cells}. ${count(tokens, "token")}${each}. ${kept}${drawn}`;
  canvas.setAttribute("aria-label", `${image?.name ?? "The image"} with its grid of patches`);
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
