"""Two hundred HTTP requests of every API, and what the scripted worker answers to each.

`python tests/gateway/recorded_requests.py` records the answers in recorded_answers.jsonl, a line each, without ids and times.
They hold the gateway's behaviour while its inside is rebuilt; what an answer must be is said by the other tests.
"""

import json
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    TESTS = Path(__file__).parents[1]
    sys.path[:0] = [str(TESTS), *map(str, (TESTS / "support").iterdir())]

import chats
import msgspec
import scripted

from saccade.errors import QueueFull, WorkerFailed
from saccade.protocol.output import Failure, FinishReason, TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest
from saccade.tokenization.tokenizer import Segment

ANSWERS = Path(__file__).parent / "recorded_answers.jsonl"

Script = Callable[[scripted.Gateway], None]
"""Sets what the worker answers."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """One request; *name* is unique. A slow reader reads nothing until the whole answer was produced."""

    name: str
    method: str
    path: str
    body: Any
    script: Script
    is_slow: bool = False


def pieces(*texts: str, finish: FinishReason = FinishReason.STOP, cached: int = 0) -> Script:
    """An answer of *texts*, a token a delta."""

    def script(gateway: scripted.Gateway) -> None:
        gateway.answer_pieces(*texts, finish=finish, num_cached_tokens=cached)

    return script


def ids_of(gateway: scripted.Gateway, *texts: str) -> list[int]:
    """Return the token ids of *texts*, of which tags are tokens."""
    return gateway.tokenizer.encode([Segment(text, text in scripted.TAGS) for text in texts])


def samples(*answers: tuple[str, ...]) -> Script:
    """Several answers, a token of each in turn; all end by themselves."""

    def script(gateway: scripted.Gateway) -> None:
        columns = [[*ids_of(gateway, *answer), gateway.eos] for answer in answers]
        gateway.worker.script = [
            TokenDelta("r", [ids[place]], FinishReason.STOP if place == len(ids) - 1 else None, index=index)
            for place in range(max(map(len, columns)))
            for index, ids in enumerate(columns)
            if place < len(ids)
        ]

    return script


def with_logprobs(*texts: str, top: int = 2, of_prompt: bool = False) -> Script:
    """An answer whose tokens have log probabilities, and its prompt too if *of_prompt*."""

    def one(token_id: int) -> TokenLogprob:
        ids = [token_id, *range(300, 300 + top)][:top]
        return TokenLogprob(-0.25, 1, ids, [-0.25 - place / 2 for place in range(len(ids))])

    def script(gateway: scripted.Gateway) -> None:
        ids = [*ids_of(gateway, *texts), gateway.eos]

        def deltas() -> Iterator[TokenDelta]:
            prompt = gateway.worker.requests[-1].token_ids if of_prompt else []
            for place, token_id in enumerate(ids):
                yield TokenDelta(
                    "r",
                    [token_id],
                    FinishReason.STOP if place == len(ids) - 1 else None,
                    logprobs=[one(token_id)],
                    prompt_logprobs=[one(each) for each in prompt[1:]] if place == 0 else [],
                )

        gateway.worker.script = deltas()  # type: ignore[assignment]

    return script


def failing(after: int, error: Exception | Failure) -> Script:
    """An answer that fails after some tokens."""

    def script(gateway: scripted.Gateway) -> None:
        ids = ids_of(gateway, "abcdefgh")[:after]
        last = error if isinstance(error, Exception) else TokenDelta("r", [], FinishReason.ERROR, failure=error)
        gateway.worker.script = [*(TokenDelta("r", [one]) for one in ids), last]

    return script


HELLO = pieces("Hello", ", ", "wörld", "!", cached=3)
CUT = pieces("one two three", finish=FinishReason.LENGTH)
THOUGHT = pieces("<think>", "Let me see.", "</think>", "\n\n", "It is a cat.")
CALL = pieces("I look.", "<tool_call>", '\n{"name": "look_up", "arguments": {"word": "cat"}}\n', "</tool_call>")
TWO_CALLS = pieces(
    "<tool_call>", '\n{"name": "look_up", "arguments": {"word": "a"}}\n', "</tool_call>", "\n",
    "<tool_call>", '\n{"name": "add", "arguments": {"x": 1, "y": [2, 3]}}\n', "</tool_call>",
)  # fmt: skip
THOUGHT_AND_CALL = pieces(
    "<think>", "Hm", "</think>", "<tool_call>", '\n{"name": "add", "arguments": {}}\n', "</tool_call>"
)
BROKEN_CALL = pieces("<tool_call>", '\n{"name": "look_up", "arguments": {"wo', finish=FinishReason.LENGTH)
LONG = pieces("The quick brown fox. " * 40)
JSON = pieces('{"colour": "red", "size": 3}')

IMAGE = chats.data_url(chats.random_image(64, 48, 1))
JPEG = chats.data_url(chats.random_image(200, 120, 2), "JPEG")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is a cat?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "cat"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "an animal"},
]


def user(*parts: Any) -> list[Any]:
    """One turn of a user."""
    return [{"role": "user", "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}]


def text(of: str) -> Fields:
    """A part of text."""
    return {"type": "text", "text": of}


def image(url: str, **fields: Any) -> Fields:
    """A part with an image."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


CHATS: dict[str, tuple[Fields, Script]] = {
    "text": ({}, HELLO),
    "unknown field": ({"colour": "red"}, HELLO),
    "user": ({"user": "me", "metadata": None}, HELLO),
    "system turn": ({"messages": [{"role": "system", "content": "Be short."}, *user("hi")]}, HELLO),
    "developer turn": ({"messages": [{"role": "developer", "content": "Be short."}, *user("hi")]}, HELLO),
    "image": ({"messages": user(image(IMAGE), text("What is it?"))}, HELLO),
    "image as a string": ({"messages": user({"type": "image_url", "image_url": IMAGE})}, HELLO),
    "two images": ({"messages": user(image(IMAGE), text("and"), image(JPEG, detail="low"))}, HELLO),
    "image twice": ({"messages": user(image(JPEG), image(JPEG))}, HELLO),
    "image and limits": ({"messages": user(image(JPEG)), "mm_processor_kwargs": {"max_pixels": 70000}}, HELLO),
    "length": ({"max_tokens": 3}, CUT),
    "max_completion_tokens": ({"max_completion_tokens": 3}, CUT),
    "unfinished character": ({}, pieces("\U0001f9ff", finish=FinishReason.LENGTH)),
    "stop string": ({"stop": ["three"]}, CUT),
    "stop string shown": ({"stop": "two", "include_stop_str_in_output": True}, CUT),
    "stop token ids": ({"stop_token_ids": [5]}, HELLO),
    "two samples": ({"n": 2}, samples(("ab", "c"), ("defg",))),
    "three samples with a stop": ({"n": 3, "stop": ["x"]}, samples(("axb",), ("cd",), ("exf",))),
    "two samples with usage": ({"n": 2, "stream_options": {"include_usage": True}}, samples(("a",), ("b",))),
    "usage": ({"stream_options": {"include_usage": True}}, HELLO),
    "no usage": ({"stream_options": {"include_usage": False}}, HELLO),
    "token ids": ({"return_token_ids": True}, HELLO),
    "logprobs": ({"logprobs": True}, with_logprobs("ab", top=0)),
    "top logprobs": ({"logprobs": True, "top_logprobs": 2}, with_logprobs("ä b")),
    "prompt logprobs": ({"prompt_logprobs": 2}, with_logprobs("ab", of_prompt=True)),
    "sampling": ({"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7}, HELLO),
    "penalties": ({"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.1}, HELLO),
    "logit bias": ({"logit_bias": {"5": 10, "6": -100}}, HELLO),
    "ignore_eos": ({"ignore_eos": True, "min_tokens": 2, "max_tokens": 8}, CUT),
    "cache salt": ({"cache_salt": "mine"}, HELLO),
    "reasoning": ({}, THOUGHT),
    "reasoning left out": ({"include_reasoning": False}, THOUGHT),
    "reasoning budget": ({"thinking_token_budget": 16}, THOUGHT),
    "unfinished reasoning": ({}, pieces("<think>", "Hm, hm", finish=FinishReason.LENGTH)),
    "reasoning of a turn before": (
        {"messages": [*user("hi"), {"role": "assistant", "content": "x", "reasoning_content": "y"}, *user("and?")]},
        HELLO,
    ),
    "call": ({"tools": TOOLS}, CALL),
    "two calls": ({"tools": TOOLS}, TWO_CALLS),
    "one call only": ({"tools": TOOLS, "parallel_tool_calls": False}, TWO_CALLS),
    "reasoning and call": ({"tools": TOOLS}, THOUGHT_AND_CALL),
    "broken call": ({"tools": TOOLS}, BROKEN_CALL),
    "no call": ({"tools": TOOLS, "tool_choice": "none"}, HELLO),
    "calls without tools": ({}, CALL),
    "history of a call": ({"messages": HISTORY, "tools": TOOLS}, HELLO),
    "continued": ({"messages": [*user("hi"), {"role": "assistant", "content": "Once"}],
                   "continue_final_message": True, "add_generation_prompt": False}, HELLO),
    "no generation prompt": ({"add_generation_prompt": False}, HELLO),
    "template switches": ({"chat_template_kwargs": {"enable_thinking": False}}, HELLO),
    "fails at once": ({}, failing(0, WorkerFailed("The worker has ended."))),
    "fails later": ({}, failing(2, WorkerFailed("The worker has ended."))),
    "fails later with usage": ({"n": 2, "stream_options": {"include_usage": True}}, failing(2, WorkerFailed("x"))),
    "failure of the engine": ({}, failing(1, Failure("worker_failed", "The step failed."))),
    "queue is full": ({}, failing(0, QueueFull("The worker's queue is full."))),
    "unknown model": ({"model": "other"}, HELLO),
    "no messages": ({"messages": []}, HELLO),
    "unknown role": ({"messages": [{"role": "king", "content": "hi"}]}, HELLO),
    "unknown part": ({"messages": user({"type": "sound"})}, HELLO),
    "damaged image": ({"messages": user(image("data:image/png;base64,iVBORw0KGgo="))}, HELLO),
    "not base64": ({"messages": user(image("data:image/png;base64,@@@@"))}, HELLO),
    "bare path": ({"messages": user(image("/tmp/cat.png"))}, HELLO),
    "forbidden host": ({"messages": user(image("http://127.0.0.1:9/cat.png"))}, HELLO),
    "too many images": ({"messages": user(*[image(IMAGE)] * 17)}, HELLO),
    "too long": ({"messages": user("word " * 5000)}, HELLO),
    "temperature of text": ({"temperature": "hot"}, HELLO),
    "temperature too high": ({"temperature": 3}, HELLO),
    "negative max_tokens": ({"max_tokens": -1}, HELLO),
    "n of zero": ({"n": 0}, HELLO),
    "top_logprobs alone": ({"top_logprobs": 2}, HELLO),
    "best_of": ({"best_of": 2}, HELLO),
    "audio": ({"modalities": ["audio"]}, HELLO),
    "unknown tool choice": ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, HELLO),
    "tool without a name": ({"tools": [{"type": "function", "function": {}}]}, HELLO),
    "call without a result": ({"messages": HISTORY[:3], "tools": TOOLS}, HELLO),
    "reasoning of a user": ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, HELLO),
}  # fmt: skip
"""Sent whole and as a stream."""

COMPLETIONS: dict[str, tuple[Fields, Script]] = {
    "text": ({}, HELLO),
    "token ids as a prompt": ({"prompt": [5, 6, 7]}, HELLO),
    "two prompts": ({"prompt": ["one", "two"]}, CUT),
    "prompts of ids": ({"prompt": [[5, 6], [7]]}, CUT),
    "two samples": ({"n": 2}, samples(("ab",), ("c",))),
    "stop": ({"stop": ["two"]}, CUT),
    "echo": ({"echo": True}, HELLO),
    "logprobs": ({"logprobs": 2}, with_logprobs("ab")),
    "usage": ({"stream_options": {"include_usage": True}}, HELLO),
    "fails at once": ({}, failing(0, WorkerFailed("The worker has ended."))),
    "fails later": ({}, failing(2, WorkerFailed("The worker has ended."))),
    "suffix": ({"suffix": "x"}, HELLO),
    "empty prompt": ({"prompt": []}, HELLO),
    "prompt of mixed types": ({"prompt": ["a", 5]}, HELLO),
    "best_of": ({"best_of": 3}, HELLO),
}

MESSAGES: dict[str, tuple[Fields, Script]] = {
    "text": ({}, HELLO),
    "system": ({"system": "Be short."}, HELLO),
    "image": (
        {"messages": user({"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                                       "data": IMAGE.partition(",")[2]}}, text("What?"))},
        HELLO,
    ),
    "length": ({"max_tokens": 2}, CUT),
    "stop sequence": ({"stop_sequences": ["two"]}, CUT),
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}, THOUGHT),
    "thinking left out": ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
                           "max_tokens": 2048}, THOUGHT),
    "call": ({"tools": [{"name": "look_up", "input_schema": {"type": "object"}}]}, CALL),
    "two calls": (
        {"tools": [{"name": name, "input_schema": {"type": "object"}} for name in ("look_up", "add")]},
        TWO_CALLS,
    ),
    "fails later": ({}, failing(2, WorkerFailed("The worker has ended."))),
    "fails at once": ({}, failing(0, WorkerFailed("The worker has ended."))),
    "no max_tokens": ({"max_tokens": None}, HELLO),
    "unknown model": ({"model": "other"}, HELLO),
    "unknown block": ({"messages": user({"type": "sound"})}, HELLO),
}  # fmt: skip

RESPONSES: dict[str, tuple[Fields, Script]] = {
    "text": ({}, HELLO),
    "not stored": ({"store": False}, HELLO),
    "instructions": ({"instructions": "Be short."}, HELLO),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE},
                                                      {"type": "input_text", "text": "What?"}]}]}, HELLO),
    "length": ({"max_output_tokens": 3}, CUT),
    "reasoning": ({}, THOUGHT),
    "call": ({"tools": [{"type": "function", **TOOLS[0]["function"]}]}, CALL),  # type: ignore[dict-item]
    "two calls": ({"tools": [{"type": "function", "name": "look_up"}, {"type": "function", "name": "add"}]}, TWO_CALLS),
    "history of a call": (
        {"input": [{"role": "user", "content": "hi"},
                   {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": "an animal"}]},
        HELLO,
    ),
    "fails later": ({}, failing(2, WorkerFailed("The worker has ended."))),
    "fails at once": ({}, failing(0, WorkerFailed("The worker has ended."))),
    "unknown previous response": ({"previous_response_id": "resp_0"}, HELLO),
    "unknown item": ({"input": [{"type": "sound"}]}, HELLO),
    "background": ({"background": True}, HELLO),
}  # fmt: skip

OTHERS: list[tuple[str, str, str, Any]] = [
    ("models", "GET", "/v1/models", None),
    ("one model", "GET", "/v1/models/tiny", None),
    ("unknown model", "GET", "/v1/models/other", None),
    ("live", "GET", "/live", None),
    ("ready", "GET", "/ready", None),
    ("health", "GET", "/health", None),
    ("unknown path", "GET", "/v1/nothing", None),
    ("wrong method", "GET", "/v1/chat/completions", None),
    ("tokenize", "POST", "/tokenize", {"prompt": "one two"}),
    ("tokenize a chat", "POST", "/tokenize", {"messages": user(image(IMAGE), text("hi"))}),
    ("tokenize nothing", "POST", "/tokenize", {}),
    ("detokenize", "POST", "/detokenize", {"tokens": [300, 301]}),
    ("detokenize an unknown id", "POST", "/detokenize", {"tokens": [2**30]}),
    ("count tokens", "POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": user("hi")}),
    ("files", "GET", "/v1/files", None),
    ("unknown file", "GET", "/v1/files/file-0", None),
    ("unknown response", "GET", "/v1/responses/resp_0", None),
    ("not JSON", "POST", "/v1/chat/completions", b"{"),
    ("empty body", "POST", "/v1/chat/completions", b""),
    ("a list", "POST", "/v1/chat/completions", []),
    ("not UTF-8", "POST", "/v1/chat/completions", b'{"model": "\xff"}'),
    ("not JSON for messages", "POST", "/v1/messages", b"{"),
    ("not JSON for responses", "POST", "/v1/responses", b"{"),
]


def recorded() -> Iterator[Recorded]:
    """Yield every request."""
    tables: tuple[tuple[str, Fields, Mapping[str, tuple[Fields, Script]]], ...] = (
        ("/v1/chat/completions", {"messages": user("hi")}, CHATS),
        ("/v1/completions", {"prompt": "once"}, COMPLETIONS),
        ("/v1/messages", {"messages": user("hi"), "max_tokens": 100}, MESSAGES),
        ("/v1/responses", {"input": "hi"}, RESPONSES),
    )
    for path, required, table in tables:
        for name, (fields, script) in table.items():
            for is_streamed in (False, True):
                body = {"model": "tiny", **required, "stream": is_streamed, **fields}
                if not is_streamed:
                    body.pop("stream_options", None)
                yield Recorded(f"{path} {'stream' if is_streamed else 'whole'}: {name}", "POST", path, body, script)
        body = {"model": "tiny", **required, "stream": True}
        yield Recorded(f"{path} slow reader", "POST", path, body, LONG, is_slow=True)
    for name, method, path, body in OTHERS:
        yield Recorded(f"{path} {name}", method, path, body, HELLO)


VARIABLE = (
    (re.compile(r'"(id|item_id|response_id|call_id|tool_use_id)":"(chatcmpl|cmpl|resp|msg|call|fc|rs|toolu|file|item)[-_][^"]+"'), r'"\1":"\2"'),
    (re.compile(r'"(created|created_at|completed_at)":[0-9.]+'), r'"\1":0'),
    (re.compile(r'"request_id":"[^"]*"'), '"request_id":"r"'),
)  # fmt: skip
"""What differs from one answer to the next: ids and times."""


def exchange(gateway: scripted.Gateway, request: Recorded) -> list[str]:
    """Send *request*, and return what the worker got, and the answer's lines without ids, times and framing."""
    request.script(gateway)
    gateway.worker.requests.clear()
    body = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
    head = f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: r\r\n"
    if request.method == "POST":
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n" + (body if request.method == "POST" else b""))
        while request.is_slow and gateway.metric("saccade_requests_in_flight"):
            threading.Event().wait(0.01)
        raw = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head_bytes, _, rest = raw.partition(b"\r\n\r\n")
    lines = head_bytes.decode().split("\r\n")
    if any(line.lower() == "transfer-encoding: chunked" for line in lines):
        rest = b"".join(_chunks(rest))
    found = rest.decode()
    for pattern, replacement in VARIABLE:
        found = pattern.sub(replacement, found)
    kept = sorted(line for line in lines[1:] if not line.lower().startswith(("date:", "content-length:")))
    return [*map(_sent, gateway.worker.requests), lines[0], *kept, "", *found.split("\n")]


def _sent(request: EngineRequest) -> str:
    """Return what a worker got, without what differs from one process to the next."""
    fields = msgspec.to_builtins(request)
    del fields["request_id"]
    for item in fields["media"]:
        for name in ("content_hash", "slot", "inline"):
            item.pop(name, None)
    return json.dumps(fields)


def _chunks(framed: bytes) -> Iterator[bytes]:
    """Yield the pieces of a chunked body; ValueError if the last one is missing."""
    while True:
        size, _, rest = framed.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return
        yield rest[:length]
        framed = rest[length + 2 :]


def main() -> None:
    """Record the answers of today's gateway."""
    import checkpoints

    with tempfile.TemporaryDirectory() as folder, scripted.running(checkpoints.write_qwen3_vl(Path(folder))) as gateway:
        lines = [json.dumps([request.name, exchange(gateway, request)], ensure_ascii=False) for request in recorded()]
    ANSWERS.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} answers, {ANSWERS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
