"use strict";
// The boxes that an answer names: {label, sides}, sides being [left, top, right, bottom] as the model wrote them.
// Models write {"bbox_2d": [left, top, right, bottom], "label": "cat"} (Qwen), {"box_2d": [top, left, bottom, right],
// "label": "cat"} (Gemma), <ref>cat</ref><box>[[...]]</box> (InternVL), cat(left,top),(right,bottom) (Qwen2-VL), or
// nothing but [[...]] (GLM). Each expression reads a text in a time that grows with its length only.
const MAX_BOXES = 200;
const NUMBER = String.raw`\s{0,9}(-?\d{1,6}(?:\.\d{1,9})?)\s{0,9}`;
const FOUR = String.raw`\[{1,2}${NUMBER},${NUMBER},${NUMBER},${NUMBER}\]{1,2}`;
const OBJECT = /\{[^{}]*\}/g;
const TAGGED = new RegExp(String.raw`(?:<ref>([^<]{1,200})</ref>\s{0,9})?<box>\s{0,9}${FOUR}`, "g");
const PAIRS = new RegExp(String.raw`([\p{L}\p{N} ]{0,80})\(${NUMBER},${NUMBER}\),\s{0,9}\(${NUMBER},${NUMBER}\)`, "gu");
const BARE = new RegExp(`^${FOUR}$`);

function boxesOf(answer) {
  const boxes = [...answer.matchAll(OBJECT)].map(([text]) => ofObject(text));
  for (const [, label = "", ...sides] of [...answer.matchAll(TAGGED), ...answer.matchAll(PAIRS)]) {
    boxes.push({ label, sides });
  }
  const [, ...bare] = answer.trim().match(BARE) ?? [];
  boxes.push({ label: "", sides: bare });
  return boxes.map(({ label, sides }) => ({ label: String(label).trim().slice(0, 80), sides: sides.map(Number) }))
    .filter(({ sides }) => sides.length === 4 && sides.every(Number.isFinite))
    .filter(({ sides: [left, top, right, bottom] }) => left < right && top < bottom)
    .slice(0, MAX_BOXES);
}

function ofObject(text) {
  let object;
  try { object = JSON.parse(text); } catch { return { label: "", sides: [] }; }
  const { bbox_2d: ofQwen, bbox, box_2d: ofGemma, label, text_content: content, text: words } = object;
  const [top, left, bottom, right] = Array.isArray(ofGemma) ? ofGemma : [];
  const sides = [ofQwen, bbox, ofGemma && [left, top, right, bottom]].find(Array.isArray) ?? [];
  return { label: label ?? content ?? words ?? "", sides };
}

// Returns the boxes of an answer in parts of the image's sides. A model that was not trained for boxes has none.
function placedBoxes(answer, coordinates, { width, height }) {
  const scales = { thousandths: [1000, 1000], pixels: [width, height] }[coordinates];
  if (!scales) return [];
  return boxesOf(answer).map(({ label, sides }) => ({ label, sides: sides.map((side, index) =>
    Math.min(1, Math.max(0, side / scales[index % 2]))) }));
}

function drawBoxes(context, boxes) {
  const { width, height } = context.canvas;
  const unit = Math.max(1, width / 600);
  context.font = `600 ${14 * unit}px system-ui, sans-serif`;
  context.textBaseline = "top";
  boxes.forEach(({ sides: [left, top, right, bottom] }, index) => {
    const place = [left * width, top * height, (right - left) * width, (bottom - top) * height];
    for (const [line, style] of [[5, "#fff"], [2.5, "#c0186c"]]) {
      Object.assign(context, { lineWidth: line * unit, strokeStyle: style });
      context.strokeRect(...place);
    }
    const number = String(index + 1);
    context.fillStyle = "#c0186c";
    context.fillRect(place[0], place[1], context.measureText(number).width + 8 * unit, 18 * unit);
    context.fillStyle = "#fff";
    context.fillText(number, place[0] + 4 * unit, place[1] + 2 * unit);
  });
}
