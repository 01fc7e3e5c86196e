"use strict";
// The body of a request for the chat API: the whole conversation, with the attachments of every turn.
const headers = () => (
  { "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });

// A turn without an answer, such as one that was stopped early, counts only while it is the last.
const counted = (turns) => turns.filter(({ answer }, index) => answer || index === turns.length - 1);

function messagesOf({ question, attachments, answer }, urlOf) {
  const content = attachments.map((attachment) => {
    const kind = attachment.kind === "video" ? "video_url" : "image_url";  // a PDF stands in an image's place
    return { type: kind, [kind]: { url: urlOf(attachment) } };
  });
  if (question) content.push({ type: "text", text: question });
  return [{ role: "user", content }, ...(answer ? [{ role: "assistant", content: answer }] : [])];
}

function body(turns, urlOf = ({ url }) => url) {
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  const messages = counted(turns).flatMap((turn) => messagesOf(turn, urlOf));
  return { model: $("model").value || undefined, messages: [...system, ...messages], ...settings() };
}

// A setting without a value is left to the server.
const settings = () => Object.fromEntries(
  [["temperature", $("temperature")], ["max_tokens", $("length")]]
    .filter(([, field]) => field.value).map(([name, field]) => [name, field.valueAsNumber]));
