"use strict";
// The boxes that an answer names: {label, sides}, sides being [left, top, right, bottom] as the model counts them.
// Models write {"bbox_2d": [left, top, right, bottom], "label": "cat"} (Qwen, GLM), {"box_2d": [...], "label": "cat"}
// (GLM; Gemma, whose top comes before left), <ref>cat</ref><box>[[...], [...]]</box> (InternVL), cat(left,top),
// (right,bottom) (Qwen2-VL), [[...], [...]] in a sentence (GLM, InternVL), or nothing but [...]. Each expression reads
// a text in a time that grows with its length only.
const MAX_BOXES = 200;
const NUMBER = String.raw`\s{0,9}(-?\d{1,6}(?:\.\d{1,9})?)\s{0,9}`;
const FOUR = String.raw`\[${NUMBER},${NUMBER},${NUMBER},${NUMBER}\]`;
const FOURS = new RegExp(FOUR, "g");
const OBJECT = /\{[^{}]*\}/g;
const TAGGED = /(?:<ref>([^<]{1,200})<\/ref>\s{0,9})?<box>([^<]{1,9999})<\/box>/g;
const LISTED = new RegExp(String.raw`\[\s{0,9}${FOUR}(?:\s{0,9},\s{0,9}${FOUR})*\s{0,9}\]`, "g");
const PAIRS = new RegExp(String.raw`([\p{L}\p{N} ]{0,80})\(${NUMBER},${NUMBER}\),\s{0,9}\(${NUMBER},${NUMBER}\)`, "gu");
const BARE = new RegExp(`^${FOUR}$`);

function boxesOf(answer, coordinates) {
  const boxes = [...answer.matchAll(OBJECT)].flatMap(([text]) => ofObject(text, coordinates));
  for (const [, label = "", content] of answer.matchAll(TAGGED)) boxes.push(...ofLists(label, content));
  for (const [, label, ...sides] of answer.matchAll(PAIRS)) boxes.push({ label, sides });
  const text = answer.replace(OBJECT, "").replace(TAGGED, "").trim();
  for (const [list] of BARE.test(text) ? [[text]] : text.matchAll(LISTED)) boxes.push(...ofLists("", list));
  return boxes.map(({ label, sides }) => ({ label: String(label).trim().slice(0, 80), sides: sides.map(Number) }))
    .filter(({ sides }) => sides.length === 4 && sides.every(Number.isFinite))
    .filter(({ sides: [left, top, right, bottom] }) => left < right && top < bottom)
    .slice(0, MAX_BOXES);
}

const ofLists = (label, text) => [...text.matchAll(FOURS)].map(([, ...sides]) => ({ label, sides }));

function ofObject(text, coordinates) {
  let object;
  try { object = JSON.parse(text); } catch { return []; }
  const { bbox_2d, bbox, box_2d, label, text_content, text: words } = object;
  const named = [bbox_2d, bbox, box_2d].find(Array.isArray) ?? [];
  const isTopFirst = named === box_2d && coordinates === "thousandths_top_first";
  return (named.every(Array.isArray) ? named : [named]).map(([first, second, third, fourth]) => (
    { label: label ?? text_content ?? words ?? "",
      sides: isTopFirst ? [second, first, fourth, third] : [first, second, third, fourth] }));
}

// Returns the boxes of an answer in parts of the image's sides. A model that was not trained for boxes has none.
function placedBoxes(answer, coordinates, { width, height }) {
  const thousandths = [1000, 1000];
  const scales = { thousandths, thousandths_top_first: thousandths, pixels: [width, height] }[coordinates];
  if (!scales) return [];
  return boxesOf(answer, coordinates).map(({ label, sides }) => ({ label, sides: sides.map((side, index) =>
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
