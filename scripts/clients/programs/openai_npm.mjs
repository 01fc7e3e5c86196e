// openai for Node: chats and Responses, streams, tools, structured output. Release 6 is the last that runs on Node 20.

// /// script
// dependencies = ["openai@6.49.0", "zod@4.6.7"]
// ///

import { createReadStream, readFileSync } from "node:fs";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { API_KEY, READER_ROOT, READER_MODEL, CALLER_ROOT, CALLER_MODEL, IMAGE, IMAGE_SAYS } = process.env;
const version = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url))).version;
const reader = new OpenAI({ baseURL: `${READER_ROOT}/v1`, apiKey: API_KEY, maxRetries: 0 });
const caller = new OpenAI({ baseURL: `${CALLER_ROOT}/v1`, apiKey: API_KEY, maxRetries: 0 });

const url = `data:image/png;base64,${readFileSync(IMAGE).toString("base64")}`;
const messages = [
  {
    role: "user",
    content: [
      { type: "image_url", image_url: { url } },
      { type: "text", text: "What does it say?" },
    ],
  },
];
const parameters = {
  type: "object",
  properties: { side: { type: "string", enum: ["left", "right"] } },
  required: ["side"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "turn", description: "Turn the camera.", parameters } }];
const Card = z.object({ shape: z.enum(["round", "square"]), isRed: z.boolean() });

function expect(found, ...wanted) {
  if (!wanted.includes(found)) throw new Error(`expected ${wanted.join(" or ")}, got ${JSON.stringify(found)}`);
}

async function models() {
  const ids = [];
  for await (const model of reader.models.list()) ids.push(model.id);
  expect(ids.join(), READER_MODEL);
}

async function chat() {
  const answer = await reader.chat.completions.create({ model: READER_MODEL, messages });
  expect(answer.choices[0].message.content, IMAGE_SAYS);
}

async function stream() {
  const options = { stream: true, stream_options: { include_usage: true } };
  let text = "";
  let tokens = 0;
  for await (const chunk of await reader.chat.completions.create({ model: READER_MODEL, messages, ...options })) {
    text += chunk.choices[0]?.delta.content ?? "";
    tokens = chunk.usage?.completion_tokens ?? tokens;
  }
  expect(text, IMAGE_SAYS);
  expect(tokens > 0, true);
}

async function tool() {
  const asked = { model: CALLER_MODEL, tools };
  const held = { tool_choice: "required", parallel_tool_calls: false, max_tokens: 1900 };
  const first = await caller.chat.completions.create({ messages, ...asked, ...held });
  const [call] = first.choices[0].message.tool_calls;
  expect(call.function.name, "turn");
  expect(JSON.parse(call.function.arguments).side, "left", "right");
  const result = { role: "tool", tool_call_id: call.id, content: "done" };
  const turns = [...messages, first.choices[0].message, result];
  const second = await caller.chat.completions.create({ messages: turns, ...asked, max_tokens: 4 });
  expect(second.choices[0].finish_reason, "length", "stop", "tool_calls");
}

async function toolStream() {
  const held = { tool_choice: { type: "function", function: { name: "turn" } }, max_tokens: 1900 };
  const events = caller.chat.completions.stream({ model: CALLER_MODEL, messages, tools, ...held });
  const [call] = (await events.finalChatCompletion()).choices[0].message.tool_calls;
  expect(JSON.parse(call.function.arguments).side, "left", "right");
}

async function parse() {
  const format = { response_format: zodResponseFormat(Card, "card"), max_tokens: 1900 };
  const answer = await caller.chat.completions.parse({ model: CALLER_MODEL, messages, ...format });
  Card.parse(answer.choices[0].message.parsed);
}

async function error() {
  try {
    await reader.chat.completions.create({ model: READER_MODEL, messages, temperature: 9 });
  } catch (refused) {
    expect(refused instanceof OpenAI.BadRequestError, true);
    expect(refused.param, "temperature");
    return;
  }
  throw new Error("temperature 9 was accepted");
}

async function files() {
  const file = await reader.files.create({ file: createReadStream(IMAGE), purpose: "vision" });
  const content = [
    { type: "file", file: { file_id: file.id } },
    { type: "text", text: "What does it say?" },
  ];
  const asked = { model: READER_MODEL, messages: [{ role: "user", content }] };
  const answer = await reader.chat.completions.create(asked);
  expect(answer.choices[0].message.content, IMAGE_SAYS);
  expect((await reader.files.delete(file.id)).deleted, true);
}

async function response() {
  const content = [
    { type: "input_image", image_url: url, detail: "auto" },
    { type: "input_text", text: "What does it say?" },
  ];
  const input = [{ role: "user", content }];
  const first = await reader.responses.create({ model: READER_MODEL, input });
  expect(first.output_text, IMAGE_SAYS);
  let text = "";
  for await (const event of await reader.responses.create({ model: READER_MODEL, input, stream: true }))
    if (event.type === "response.output_text.delta") text += event.delta;
  expect(text, IMAGE_SAYS);
}

const attempts = {
  models,
  "a chat with an image": chat,
  "the same in a stream, with usage": stream,
  "a required tool call, and its result": tool,
  "a named tool call by `.stream()`": toolStream,
  "structured output by `.parse` and zod": parse,
  "the field of an error": error,
  "an image uploaded by `files`": files,
  "Responses: an image, whole and in events": response,
};
for (const [what, attempt] of Object.entries(attempts)) {
  let detail = "";
  try {
    await attempt();
  } catch (failure) {
    console.error(failure);
    detail = `${failure.name}: ${failure.message}`.slice(0, 300);
  }
  console.log(JSON.stringify({ client: "openai for Node", version, what, ok: !detail, detail }));
}
