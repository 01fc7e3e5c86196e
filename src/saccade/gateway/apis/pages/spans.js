"use strict";
// The inline Markdown of a text as nodes: code, formulas, bold, italics, links. All else is text. The time grows with
// the text's length only, whatever a model writes: each closing mark is searched for once, and nesting is bounded.
const MAX_OPEN = 8;  // marks of bold and italics within each other
const SPECIAL = /\\.|`+|\$\$?|!?\[|\*+|_+|~~|<?https?:\/\//gsu;
const TAGS = { "*": ["em"], "_": ["em"], "**": ["strong"], "__": ["strong"], "***": ["strong", "em"], "~~": ["del"] };
const LINK = /!?\[([^[\]]*)\]\(\s?<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?: "[^"\n]*")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`|\\]{1,2000}/y;

// Returns a list of elements and strings, for make().
function spansOf(text, hasLinks = true) {
  const frames = [{ mark: "", nodes: [] }];  // the last one takes what comes next
  const missing = new Set();  // closing marks that do not come any more
  let at = 0;
  for (;;) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    add(frames, text.slice(at, found?.index ?? text.length));
    if (!found) break;
    const [mark] = found;
    const begin = found.index;
    at = begin + mark.length;
    const span = literalAt(text, begin, mark, missing) ?? (hasLinks ? linkAt(text, begin, mark) : null);
    if (span) { add(frames, span.node); at = span.end; }
    else if (TAGS[mark]) emphasize(frames, mark, text[begin - 1] ?? " ", text[at] ?? " ");
    else add(frames, /^\\[!-/:-@[-`{-~]$/.test(mark) ? mark[1] : mark);
  }
  while (frames.length > 1) spill(frames);
  return frames[0].nodes;
}

// Adds a node, or a text, to the last frame; texts in a row become one.
function add(frames, node) {
  const { nodes } = frames.at(-1);
  if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
  else if (node !== "") nodes.push(node);
}

// Code and formulas: what is between their marks is text.
function literalAt(text, begin, mark, missing) {
  const isCode = mark[0] === "`";
  const closer = isCode ? mark : { "\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$" }[mark];
  if (!closer || missing.has(closer)) return null;
  const inner = begin + mark.length;
  const close = isCode ? runAt(text, inner, mark.length) : text.indexOf(closer, inner);
  if (close < 0) { missing.add(closer); return null; }
  const end = close + closer.length;
  if (close === inner || mark === "$" && isPrice(text, inner, close)) return null;
  const code = isCode ? text.slice(inner, close).replace(/^ (.*\S.*) $/s, "$1") : text.slice(begin, end);
  return { node: make("code", isCode ? {} : { class: "tex" }, code), end };
}

// Two prices in a sentence are no formula.
const isPrice = (text, inner, close) =>
  /\s/.test(text[inner]) || /[\s\\]/.test(text[close - 1]) || /\d/.test(text[close + 1] ?? "");

// Returns the index of the next run of exactly *length* backticks; -1 if there is none.
function runAt(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    const begin = at;
    while (text[at] === "`") at += 1;
    if (at - begin === length) return begin;
  }
  return -1;
}

function linkAt(text, begin, mark) {
  if (mark.endsWith("[")) {
    LINK.lastIndex = begin;
    const [source, label, url] = LINK.exec(text) ?? [];
    const node = source && linkTo(url, spansOf(label || url, false));
    return node ? { node, end: begin + source.length } : null;
  }
  if (!mark.endsWith("://")) return null;
  ADDRESS.lastIndex = begin + (mark[0] === "<");
  const [source] = ADDRESS.exec(text) ?? [""];
  const isEnclosed = mark[0] === "<" && text[ADDRESS.lastIndex] === ">";
  const url = isEnclosed ? source : withoutEnd(source);
  const node = linkTo(url, url);
  return node ? { node: isEnclosed ? node : make("span", {}, mark[0] === "<" ? "<" : "", node),
    end: begin + (mark[0] === "<") + url.length + isEnclosed } : null;
}

// A full stop, or the mark of bold text, after an address is not part of the address.
function withoutEnd(address) {
  let end = address.length;
  while (".,;:!?'*_~".includes(address[end - 1]) || address[end - 1] === ")" && !address.includes("(")) end -= 1;
  return address.slice(0, end);
}

// Returns a link; null if *url* is not a whole address of http or https.
function linkTo(url, label) {
  if (!/^https?:\/\//i.test(url) || !URL.canParse(url)) return null;
  return make("a", { href: url, title: url, rel: "noopener noreferrer", target: "_blank" }, label);
}

function emphasize(frames, mark, before, after) {
  const isWord = (character) => /[\p{L}\p{N}]/u.test(character);
  const isInWord = mark[0] === "_" && isWord(before) && isWord(after);
  const open = frames.findLastIndex((frame) => frame.mark === mark);
  const innermost = frames.at(-1).mark;
  if (mark === "***" && open < 0 && (innermost === "*" || innermost === "**")) {  // closes two
    emphasize(frames, innermost, before, after);
    return emphasize(frames, mark.slice(innermost.length), before, after);
  }
  if (open > 0 && !/\s/.test(before) && !isInWord) {
    while (frames.length > open + 1) spill(frames);
    const { nodes } = frames.pop();
    const [outer, inner] = TAGS[mark];
    add(frames, make(outer, {}, inner ? make(inner, {}, nodes) : nodes));
  } else if (!/\s/.test(after) && !isInWord && frames.length <= MAX_OPEN) frames.push({ mark, nodes: [] });
  else add(frames, mark);
}

// The mark of the last frame has no closing mark, so the mark is text.
function spill(frames) {
  const { mark, nodes } = frames.pop();
  add(frames, mark);
  for (const node of nodes) add(frames, node);
}
