"use strict";
// The conversation. It stays in memory: sessionStorage holds a few megabytes, which one or two photos fill.
let turns = [];  // {question, attachments, answer, reasoning, view}, and what showFacts reads
let running = null;

const fail = (text) => show($("error"), text);

function ask(event) {
  event.preventDefault();
  if (running || numOpening) return;
  const url = $("url").value.trim();  // whoever typed one and asks means it
  if (url && !addUrl(url)) return;
  const turn = { question: $("question").value, attachments };
  if (!turn.question && !attachments.length) return fail("Write a question, or add an image, a PDF or a video.");
  attachments = [];
  $("question").value = "";
  drawAttachments();
  answer(turn, () => takeBack(turn));
}

function askAgain() {
  if (running) return;
  const last = turns.pop();
  last.view.remove();
  answer(last, () => { turns.push(last); $("turns").append(last.view); });
}

// What was refused goes back into the form, before what was written there in the meantime.
function takeBack(turn) {
  attachments = [...turn.attachments, ...attachments];
  $("question").value = [turn.question, $("question").value].filter(Boolean).join("\n");
  drawAttachments();
}

function beginAnew() {
  running?.abort();
  turns = [];
  $("turns").replaceChildren();
  fail("");
  showSeen([], []);
  setRunning(running);
  writeCode();
  $("question").focus();
}

// Adds a turn and streams its answer. A turn whose request is refused is dropped, then *giveBack* is called.
async function answer({ question, attachments }, giveBack) {
  fail("");
  const view = turnView(question, attachments);
  const turn = { question, attachments, answer: "", reasoning: "", start: performance.now(), first: 0, last: 0, view };
  turns.push(turn);
  $("turns").append(view);
  $("conversation").hidden = false;
  view.scrollIntoView({ block: "nearest" });
  const controller = new AbortController();
  setRunning(controller);
  writeCode();
  const coordinates = cards.get($("model").value)?.box_coordinates;
  const sent = counted(turns).flatMap((one) => one.attachments);
  const refuse = (text) => {
    if (!turns.includes(turn)) return;  // a new conversation has begun
    fail(text);
    showSeen([], []);
    if (turn.answer) return;
    turns = turns.filter((one) => one !== turn);
    view.remove();
    giveBack();
  };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: controller.signal,
      body: JSON.stringify({ ...body(turns), stream: true, stream_options: { include_usage: true } }),
    });
    if (!response.ok) {
      refuse(await sentence(response));
      if (response.status === 401) { $("more").open = true; $("key").focus(); }
      return;
    }
    turn.warning = response.headers.get("x-saccade-warning");
    for await (const chunk of events(response.body)) take(chunk, turn);
    if (turns.includes(turn)) {
      showSeen(sent, turn.usage?.prompt_tokens_details?.images ?? [], turn.answer, coordinates);
    }
  } catch (error) {
    if (error.name === "AbortError") turn.reason = "stopped";
    else refuse(error.isServers ? error.message : UNREACHED);
  } finally {
    drawAnswer(turn);
    showFacts(turn);
    setRunning(null);
  }
}

function setRunning(controller) {
  const [from, to] = controller ? [["ask", "again"], "stop"] : [["stop"], "ask"];
  const hadFocus = from.includes(document.activeElement.id);
  running = controller;
  $("ask").disabled = controller !== null;
  $("stop").disabled = controller === null;
  $("again").disabled = controller !== null || !turns.length;
  $("conversation").hidden = !turns.length;
  turns.at(-1)?.view.querySelector(".answer").setAttribute("aria-busy", controller !== null);
  if (hadFocus) $(to).focus();
}

function take(chunk, turn) {
  if (chunk.error) throw Object.assign(new Error(chunk.error.message), { isServers: true });
  turn.usage = chunk.usage ?? turn.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  turn.reason = choice.finish_reason ?? turn.reason;
  const { content, reasoning_content: reasoning } = choice.delta;
  if (content || reasoning) { turn.last = performance.now(); turn.first ||= turn.last; }
  turn.reasoning += reasoning ?? "";
  turn.answer += content ?? "";
  // Many tokens may come between two frames of the screen.
  turn.frame ||= requestAnimationFrame(() => { turn.frame = 0; drawAnswer(turn); });
}
