"use strict";
// Markdown as nodes of the page. Every word of a model becomes a text node or an attribute of a checked link.
const sources = new WeakMap();  // from the node of a block to the block's Markdown

// Shows *text* in *place*. Blocks that stay the same keep their nodes, and so a reader's selection and focus.
function drawMarkdown(place, text) {
  const blocks = blocksOf(text);
  const numSame = blocks.findIndex(({ source }, index) => sources.get(place.children[index]) !== source);
  if (numSame >= 0) {
    while (place.children.length > numSame) place.lastElementChild.remove();
    for (const block of blocks.slice(numSame)) {
      const node = nodeOf(block);
      sources.set(node, block.source);
      place.append(node);
    }
  }
  while (place.children.length > blocks.length) place.lastElementChild.remove();
}

const nodesOf = (blocks) => blocks.map(nodeOf);

const NODES = {
  paragraph: ({ text }) => make("p", {}, spansOf(text)),
  // The page has headings of the levels 1 and 2 itself.
  heading: ({ level, text }) => make(`h${Math.min(6, level + 2)}`, {}, spansOf(text)),
  rule: () => make("hr"),
  quote: ({ blocks }) => make("blockquote", {}, nodesOf(blocks)),
  list: ({ isOrdered, start, items }) => make(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start } : {},
    items.map((blocks) => make("li", {}, nodesOf(blocks)))),
  table: ({ heads, rows }) => make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    table(heads.map((cell) => spansOf(cell)), rows.map((cells) => cells.map((cell) => spansOf(cell))))),
  code: ({ language, code }) => {
    const text = make("pre", { tabindex: "0", "aria-label": `Code ${language}`.trim(), role: "group" },
      make("code", {}, code));
    const button = make("button", { type: "button", class: "small", onclick: () => copyText(text, button) }, "Copy");
    return make("div", { class: "code" }, make("div", { class: "row" },
      make("span", { class: "soft grow" }, language || "Code"), button), text);
  },
};

const nodeOf = (block) => NODES[block.kind](block);
