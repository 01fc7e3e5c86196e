"use strict";
// One request and its answer.
let running = null;

const headers = () => (
  { "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });
const fail = (text) => show($("error"), text);

function body(urlOf = (image) => image.url) {
  const content = images.map((image) => ({ type: "image_url", image_url: { url: urlOf(image) } }));
  if ($("question").value) content.push({ type: "text", text: $("question").value });
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  return { model: $("model").value || undefined, messages: [...system, { role: "user", content }] };
}

async function ask(event) {
  event.preventDefault();
  if (running) return;
  fail("");
  $("answer").textContent = $("reasoning").textContent = "";
  $("thoughts").hidden = $("facts").hidden = true;
  setRunning(new AbortController());
  const sent = { images: [...images], start: performance.now(), first: 0, last: 0, usage: null, reason: "" };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({ ...body(), stream: true, stream_options: { include_usage: true } }),
    });
    if (!response.ok) return refuse(response.status, await sentence(response));
    sent.warning = response.headers.get("x-saccade-warning");
    for await (const chunk of events(response.body)) take(chunk, sent);
    showFacts(sent);
  } catch (error) {
    if (error.name === "AbortError") showFacts({ ...sent, reason: "stopped" });
    else refuse(0, error.isServers ? error.message : UNREACHED);
  } finally {
    setRunning(null);
  }
}

function refuse(status, text) {
  fail(text);
  showSeen([], []);
  if (status === 401) { $("more").open = true; $("key").focus(); }
}

function setRunning(controller) {
  const hadFocus = document.activeElement === $("stop");
  running = controller;
  $("ask").disabled = controller !== null;
  $("stop").disabled = controller === null;
  $("answer").setAttribute("aria-busy", controller !== null);
  if (hadFocus && !controller) $("ask").focus();
}

function take(chunk, sent) {
  if (chunk.error) throw Object.assign(new Error(chunk.error.message), { isServers: true });
  sent.usage = chunk.usage ?? sent.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  sent.reason = choice.finish_reason ?? sent.reason;
  const { content, reasoning_content: reasoning } = choice.delta;
  if (content || reasoning) { sent.last = performance.now(); sent.first ||= sent.last; }
  if (reasoning) { $("thoughts").hidden = false; $("reasoning").append(reasoning); }
  if (content) $("answer").append(content);
}
