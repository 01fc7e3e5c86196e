"use strict";
// The blocks of a Markdown text: {kind, source, ...}, in the text's order. An unclosed block lasts until the end, as
// while an answer arrives. Code by indentation alone is a paragraph, and HTML is text: models mean what they write.
const MAX_DEPTH = 8;  // of lists and quotes within each other; deeper ones are paragraphs
const MAX_COLUMNS = 100;  // of a table; wider ones are paragraphs

// No two parts of an expression match the same characters, so none takes the square of a line's length.
const FENCE = /^ *(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/s;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/s;
const MATHS = /^ *(\$\$|\\\[)/;
const CLOSERS = { "$$": "$$", "\\[": "\\]" };

function blocksOf(text, depth = 0) {
  const lines = text.split(/\r?\n/);
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [end, block] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), ...block });
    at = end;
  }
  return blocks;
}

// Returns the line after the block that begins at a line, and the block.
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fenced(lines, at);
  if (MATHS.test(line)) return formula(lines, at);
  if (HEADING.test(line)) {
    const [, { length: level }, text = ""] = line.match(HEADING);
    return [at + 1, { kind: "heading", level, text: text.replace(/ #+ *$/, "") }];
  }
  if (RULE.test(line)) return [at + 1, { kind: "rule" }];
  if (hasTable(lines, at)) return tableAt(lines, at);
  if (depth < MAX_DEPTH && isQuote(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  return paragraph(lines, at, depth);
}

const isQuote = (line) => /^ {0,3}>/.test(line);
const indentOf = (line) => line.length - line.trimStart().length;
const interrupts = (lines, at, depth) => [FENCE, MATHS, HEADING, RULE].some((start) => start.test(lines[at]))
  || hasTable(lines, at) || depth < MAX_DEPTH && (isQuote(lines[at]) || ITEM.test(lines[at]));

// A fence closes with as many of its marks, or more, and no language: others are the code's own.
function fenced(lines, at) {
  const [, mark, language] = lines[at].match(FENCE);
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = indentOf(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  return [Math.min(end + 1, lines.length), { kind: "code", language: language.trim(), code }];
}

function formula(lines, at) {
  const [, opener] = lines[at].match(MATHS);
  let end = at;
  let from = lines[at].indexOf(opener) + opener.length;
  while (end < lines.length && lines[end].indexOf(CLOSERS[opener], from) < 0) { end += 1; from = 0; }
  // What follows a formula on its line, such as a full stop, stays with it.
  end = Math.min(end + 1, lines.length);
  return [end, { kind: "code", language: "TeX", code: lines.slice(at, end).join("\n") }];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  return [end, { kind: "paragraph", text: lines.slice(at, end).join("\n") }];
}

function quote(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && isQuote(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ *> ?/, "")).join("\n");
  return [end, { kind: "quote", blocks: blocksOf(inner, depth + 1) }];
}

// What is indented by more than an item's mark belongs to the item, as models indent by 2 to 4 spaces.
function list(lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const [, lead = "", next, first = ""] = lines[end].match(ITEM) ?? [];
    if (!next || RULE.test(lines[end]) || /\d/.test(next) !== isOrdered || lead.length > indent.length + 1) break;
    const begin = end + 1;
    end = endOfItem(lines, begin, lead.length, depth);
    const nested = lines.slice(begin, end);
    const indents = nested.filter((line) => line.trim()).map(indentOf).filter((one) => one > lead.length + 1);
    const depthOfText = Math.min(indents[0] ?? 0, lead.length + next.length + 1);
    const inner = nested.map((line) => line.slice(Math.min(indentOf(line), depthOfText)));
    items.push(blocksOf([first, ...inner].join("\n"), depth + 1));
  }
  return [end, { kind: "list", isOrdered, start: parseInt(mark) || 0, items }];
}

function endOfItem(lines, begin, indent, depth) {
  let end = begin;
  for (let at = begin; at < lines.length; at += 1) {
    if (!lines[at].trim()) continue;
    const isLazy = at === end && !interrupts(lines, at, depth);  // the paragraph goes on, without a blank line
    if (indentOf(lines[at]) <= indent + 1 && !isLazy) {
      // Blank lines between two items belong to the list.
      return ITEM.test(lines[at]) ? at : end;
    }
    end = at + 1;
  }
  return end;
}

// A cell ends at a bar, unless a backslash is before the bar.
function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (!cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function hasTable(lines, at) {
  const next = lines[at + 1];
  if (!lines[at].includes("|") || !next?.includes("-") || /[^-|: ]/.test(next)) return false;
  const heads = cellsOf(next);
  return heads.length <= MAX_COLUMNS && heads.every((cell) => /^:?-+:?$/.test(cell))
    && heads.length === cellsOf(lines[at]).length;
}

function tableAt(lines, at) {
  const heads = cellsOf(lines[at]);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) => {
    const cells = cellsOf(line);
    return heads.map((_, column) => cells[column] ?? "");
  });
  return [end, { kind: "table", heads, rows }];
}
