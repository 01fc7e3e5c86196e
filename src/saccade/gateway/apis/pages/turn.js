"use strict";
// One turn as the page shows it: the question with its files, the reasoning, the answer, and what the answer took.
const grouped = (number) => number.toLocaleString("en");
const count = (number, noun) => `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;

function turnView(question, attachments) {
  return make("li", { class: "turn" },
    make("div", { class: "asked" },
      attachments.length ? make("ul", { class: "attachments", "aria-label": "Files of this question" },
        ...attachments.map((attachment) => make("li", {}, ...preview(attachment)))) : null,
      make("p", { class: "question" }, question)),
    make("details", { class: "thoughts", hidden: true },
      make("summary", {}, "Reasoning"), make("p", { class: "reasoning" })),
    make("div", { class: "answer", "aria-live": "polite", "aria-busy": "true" }),
    make("div", { class: "facts", role: "status", hidden: true }));
}

function drawAnswer({ answer, reasoning, view }) {
  view.querySelector(".thoughts").hidden = !reasoning;
  view.querySelector(".reasoning").textContent = reasoning;
  drawMarkdown(view.querySelector(".answer"), answer);
}

// A server that says nothing of its cache gets no share.
const ofCache = (cached, prompt) =>
  cached === undefined ? "" : `${cached ? grouped(cached) : "none"} cached${cached ? ` (${Math.floor(100 * cached / prompt)} %)` : ""}`;

function factsOf({ start, first, last, usage, reason, warning }) {
  const facts = [];
  if (first) facts.push(["first token after", `${Math.round(first - start)} ms`]);
  if (last > first) facts.push(["all after", `${((last - start) / 1000).toFixed(1)} s`]);
  if (usage) {
    const { prompt_tokens: prompt, completion_tokens: number, prompt_tokens_details: details } = usage;
    const { reasoning_tokens: ofReasoning } = usage.completion_tokens_details ?? {};
    const rate = 1000 * (number - 1) / (last - first);
    // Of a few tokens that arrive together, a rate says nothing.
    if (last > first + 20 && number > 4) facts.push(["speed", `${rate.toFixed(0)} tokens/s`]);
    const ofMedia = [["image", details?.image_tokens], ["video", details?.video_tokens]]
      .map(([name, tokens]) => tokens ? `${grouped(tokens)} of ${name}s` : "");
    const parts = [ofCache(details?.cached_tokens, prompt), ...ofMedia].filter(Boolean).join(", ");
    facts.push(["answer", count(number, "token"), ofReasoning ? `${ofReasoning} of reasoning` : ""],
      ["prompt", count(prompt, "token"), parts]);
  }
  const ends = { length: "its limit of tokens", stopped: "the Stop button" };
  if (reason && reason !== "stop") facts.push(["ended by", ends[reason] ?? reason]);
  if (warning) facts.push(["warning", warning]);
  return facts;
}

function showFacts(turn) {
  const facts = factsOf(turn);
  const place = turn.view.querySelector(".facts");
  place.replaceChildren(make("dl", {}, ...facts.map(([name, value, note]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value), note && make("dd", { class: "soft" }, note)))));
  place.hidden = !facts.length;
}
