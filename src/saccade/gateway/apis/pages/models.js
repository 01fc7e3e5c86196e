"use strict";
// The models of the server.
let retry = 0, cards = new Map();  // what the server says of each model

async function loadModels() {
  clearTimeout(retry);
  const response = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (response && response.status < 500 && !response.ok) {
    const isMissing = response.status === 401 && !$("key").value;
    fail(isMissing ? "This server has API keys. Enter one below." : await sentence(response));
    $("more").open ||= response.status === 401;
    return;
  }
  const models = response?.ok ? (await response.json()).data : [];
  const last = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
  if (models.some(({ id }) => id === last)) $("model").value = last;
  cards = new Map(models.map((card) => [card.id, card]));
  if (!models.length) {
    $("model").append(make("option", { value: "" }, "No model is ready yet"));
    retry = setTimeout(loadModels, 2000);
  }
  showNote();
  writeCode();
}

function showNote() {
  const card = cards.get($("model").value);
  const reads = card?.input_modalities ?? ["image"];
  $("media").hidden = !reads.includes("image");
  const readsVideos = reads.includes("video");
  $("file").accept = `image/*,application/pdf${readsVideos ? ",video/*" : ""}`;
  $("what").textContent = readsVideos ? "Drop images, PDFs or videos here, or paste them"
    : "Drop images or PDFs here, or paste them";
  $("note").textContent = card?.note ?? "";
  $("note").hidden = !$("note").textContent;
}
