"""Each answer goes back as it is, or without a field that may be missing, and the conversation goes on."""

import json
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import scripted
from tables import table

from saccade.models.tool_formats.json_pieces import complete_object
from saccade.protocol.output import FinishReason

Fields = dict[str, Any]
QUESTION = {"role": "user", "content": "hi"}
CALL = ("<tool_call>", '{"name": "look", "arguments": {"at": "it"}}', "</tool_call>")
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
CUT = FinishReason.LENGTH
ENDS: dict[str, tuple[tuple[str, ...], FinishReason]] = {
    "stop": (("Hello", " you"), FinishReason.STOP),
    "nothing": ((), FinishReason.STOP),
    "length": (("Hello", " you"), CUT),
    "reasoning": (("<think>", "Hm", "</think>", "Yes"), FinishReason.STOP),
    "nothing behind reasoning": (("<think>", "Hm", "</think>"), FinishReason.STOP),
    "cut in reasoning": (("<think>", "Hm"), CUT),
    "cut as reasoning begins": (("<think>",), CUT),
    "a call": (CALL, FinishReason.STOP),
    "two calls": ((*CALL, *CALL), FinishReason.STOP),
    "text and a call": (("I look.", *CALL), FinishReason.STOP),
    "reasoning and a call": (("<think>", "Hm", "</think>", *CALL), FinishReason.STOP),
    "cut in a call": (CALL[:2], CUT),
    "cut in the arguments of a call": ((CALL[0], CALL[1][:-6]), CUT),
    "a stop string": (("I say END", " and more"), FinishReason.STOP),
    "a stop string at once": (("END", " and more"), FinishReason.STOP),
}


def posted(gateway: scripted.Gateway, path: str, **fields: Any) -> scripted.Answer:
    answer = gateway.ask("POST", path, {"model": "tiny", **fields})
    assert answer.status == 200, answer.body
    return answer


def without_each(value: Any) -> Iterator[Any]:
    """Yield *value* without each of its entries in turn, and with null instead of it."""
    if isinstance(value, dict):
        for key in value:
            yield {name: one for name, one in value.items() if name != key}
            yield {**value, key: None}


class Chats:
    """Chat completions."""

    hidden = MappingProxyType({"include_reasoning": False})
    tools = ({"type": "function", "function": {"name": "look", "parameters": SCHEMA}},)

    @staticmethod
    def turn(gateway: scripted.Gateway, stream: bool, **fields: Any) -> Fields:
        """Return the answer to a question as a client sends it back."""
        body = {"messages": [QUESTION], "tools": Chats.tools, "stop": "END", **fields, "stream": stream}
        answer = posted(gateway, "/v1/chat/completions", **body)
        if not stream:
            message: Fields = answer.json["choices"][0]["message"]
            return message
        turn: Fields = {}
        for event in answer.events[:-1]:
            for name, more in event["choices"][0]["delta"].items():
                turn[name] = more if name == "role" else turn[name] + more if name in turn else more
        return turn

    @staticmethod
    def variants(turn: Fields) -> Iterator[Fields]:
        """Yield *turn* as it is, and without what may be missing."""
        rest = {name: one for name, one in turn.items() if name != "role"}
        yield from ({"role": "assistant", **one} for one in (rest, *without_each(rest), {}))
        yield from ({**turn, "content": content} for content in (None, [], ""))
        yield {"role": "assistant", "content": None, "tool_calls": [], "refusal": None}

    @staticmethod
    def go_on(gateway: scripted.Gateway, turn: Fields) -> None:
        """Ask again after *turn*, whose calls have results."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in turn.get("tool_calls") or ()
        ]
        posted(gateway, "/v1/chat/completions", messages=[QUESTION, turn, *results, QUESTION])
        posted(gateway, "/v1/chat/completions", messages=[QUESTION, turn, *results])


class Messages:
    """Anthropic's messages."""

    hidden = MappingProxyType({"thinking": {"type": "adaptive", "display": "omitted"}})

    @staticmethod
    def turn(gateway: scripted.Gateway, stream: bool, **fields: Any) -> Fields:
        """Return the answer to a question as a client sends it back."""
        body = {"messages": [QUESTION], "max_tokens": 99, "stop_sequences": ["END"], "stream": stream, **fields}
        body["tools"] = [{"name": "look", "input_schema": SCHEMA}]
        answer = posted(gateway, "/v1/messages", **body)
        if not stream:
            return {"role": "assistant", "content": answer.json["content"]}
        blocks: list[Fields] = []
        for line in answer.body.decode().splitlines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_start":
                blocks.append(event["content_block"])
            elif event.get("type") == "content_block_delta":
                for name, more in event["delta"].items():
                    if name == "partial_json":
                        blocks[-1]["input"] = json.loads(complete_object(more))
                    elif name != "type":
                        blocks[-1][name] += more
        return {"role": "assistant", "content": blocks}

    @staticmethod
    def variants(turn: Fields) -> Iterator[Fields]:
        """Yield *turn* as it is, and without what may be missing."""
        blocks = turn["content"]
        yield turn
        for place in range(len(blocks)):
            yield {**turn, "content": blocks[:place] + blocks[place + 1 :]}
        yield {**turn, "content": [{k: v for k, v in block.items() if k != "signature"} for block in blocks]}
        yield from ({"role": "assistant", **rest} for rest in ({}, {"content": None}, {"content": []}, {"content": ""}))

    @staticmethod
    def go_on(gateway: scripted.Gateway, turn: Fields) -> None:
        """Ask again after *turn*, whose calls have results."""
        calls = [block["id"] for block in turn.get("content") or () if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": one} for one in calls]
        said = {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]}
        posted(gateway, "/v1/messages", messages=[QUESTION, turn, said], max_tokens=9)
        if not calls:
            posted(gateway, "/v1/messages", messages=[QUESTION, turn], max_tokens=9)


class Responses:
    """OpenAI's responses."""

    hidden = None

    @staticmethod
    def turn(gateway: scripted.Gateway, stream: bool, **fields: Any) -> list[Fields]:
        """Return the items of the answer to a question."""
        tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
        answer = posted(gateway, "/v1/responses", input=[QUESTION], tools=tools, stream=stream, **fields)
        if not stream:
            known_as, items = answer.json["id"], answer.json["output"]
        else:
            data = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: {")]
            whole = json.loads(data[-1])["response"]
            known_as, items = whole["id"], whole["output"]
        results = Responses.results(items)
        posted(gateway, "/v1/responses", previous_response_id=known_as, input=[*results, QUESTION])
        posted(gateway, "/v1/responses", previous_response_id=known_as, input=results or "so?")
        found: list[Fields] = items
        return found

    @staticmethod
    def variants(turn: list[Fields]) -> Iterator[list[Fields]]:
        """Yield the items as they are, and without what may be missing."""
        needed = {"function_call": ("type", "call_id", "name", "arguments"), "message": ("type", "role")}
        yield turn
        for place, item in enumerate(turn):
            yield turn[:place] + turn[place + 1 :]
            kept = needed.get(item["type"], ("type",))
            optional = {name: one for name, one in item.items() if name not in kept}
            for rest in (*without_each(optional), {}, {"content": []}):
                yield [*turn[:place], {name: item[name] for name in kept} | rest, *turn[place + 1 :]]
        yield from (
            [{"role": "assistant", **rest}] for rest in ({}, {"content": None}, {"content": []}, {"content": ""})
        )

    @staticmethod
    def results(items: list[Fields]) -> list[Fields]:
        """Return the results of the calls in *items*."""
        calls = [item["call_id"] for item in items if item.get("type") == "function_call"]
        return [{"type": "function_call_output", "call_id": one, "output": "seen"} for one in calls]

    @staticmethod
    def go_on(gateway: scripted.Gateway, turn: list[Fields]) -> None:
        """Ask again after *turn*, whose calls have results."""
        posted(gateway, "/v1/responses", input=[QUESTION, *turn, *Responses.results(turn), QUESTION])
        posted(gateway, "/v1/responses", input=[QUESTION, *turn, *Responses.results(turn)])


@pytest.mark.ci
@table("stream", [False, True])
@table("end", ENDS)
@table("api", [Chats, Messages, Responses], ids=["chats", "messages", "responses"])
def test_each_answer_goes_back(api: Any, end: str, stream: bool, gateway: scripted.Gateway) -> None:  # F2 F13
    pieces, finish = ENDS[end]
    for fields in ({}, api.hidden or {}):
        gateway.answer_pieces(*pieces, finish=finish)
        turn = api.turn(gateway, stream, **fields)
        gateway.answer_two_tokens()
        for variant in api.variants(turn):
            api.go_on(gateway, variant)


def prompt_of(gateway: scripted.Gateway, path: str = "/v1/chat/completions", **fields: Any) -> str:
    """Return the text of the prompt that a request becomes."""
    posted(gateway, path, **fields)
    return gateway.tokenizer.decode(gateway.worker.requests[-1].token_ids)


EMPTY_TURNS: dict[str, Fields] = {
    "an empty text": {"content": ""},
    "no parts": {"content": []},
    "null": {"content": None},
    "nothing": {},
    "no calls": {"content": None, "tool_calls": []},
    "no refusal": {"refusal": None},
    "an empty refusal": {"refusal": ""},
    "no reasoning": {"reasoning_content": None},
}


@table("turn", EMPTY_TURNS.values(), ids=EMPTY_TURNS.keys())
def test_a_turn_without_content_is_empty(turn: Fields, gateway: scripted.Gateway) -> None:  # F2
    said = {"role": "assistant", **turn}
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(gateway, messages=[QUESTION, said, QUESTION]) == f"{expected}<|im_end|>\n{expected}"
    assert prompt_of(gateway, messages=[QUESTION, said]) == f"{expected}<|im_end|>\n<|im_start|>assistant\n"
    if said.get("content") != []:  # A list must have a text that can be continued.
        assert prompt_of(gateway, messages=[QUESTION, said], continue_final_message=True) == expected


def test_a_kept_answer_without_text_is_an_empty_turn(gateway: scripted.Gateway) -> None:
    gateway.answer_pieces()
    known_as = posted(gateway, "/v1/responses", input="hi").json["id"]
    gateway.answer_two_tokens()
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    again = prompt_of(gateway, "/v1/responses", previous_response_id=known_as, input="hi")
    assert again == f"{expected}<|im_end|>\n{expected}"


@table(
    "turn",
    [
        {"content": None, "refusal": "I cannot."},
        {"refusal": "I cannot."},
        {"content": [], "refusal": "I cannot."},
        {"content": "I ", "refusal": "cannot."},
        {"content": [{"type": "text", "text": "I "}], "refusal": "cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "cannot."}]},
    ],
)
def test_a_refusal_is_its_text(turn: Fields, gateway: scripted.Gateway) -> None:  # F2
    said = {"role": "assistant", **turn}
    for fields in ({"messages": [QUESTION, said, QUESTION]}, {"messages": [QUESTION, said]}):
        assert "<|im_start|>assistant\nI cannot.<|im_end|>" in prompt_of(gateway, **fields)
    continued = prompt_of(gateway, messages=[QUESTION, said], continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nI cannot.")


@table(
    ("path", "fields", "sentence"),
    [
        ("chat/completions", {"messages": [{"role": "user"}]}, "`messages[0].content` is missing."),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "`messages[0].content` is missing."),
        ("chat/completions", {"messages": [{"role": "system", "content": None}]}, "`messages[0].content` is missing."),
        (
            "chat/completions",
            {"messages": [{"role": "tool", "tool_call_id": "a", "content": None}]},
            "`messages[0].content` is missing.",
        ),
        ("chat/completions", {"messages": [QUESTION | {"refusal": "no"}]}, "`messages[0].refusal`: only messages of"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
            "`messages[0].content[0].refusal` is missing.",
        ),
        ("messages", {"messages": [{"role": "user"}], "max_tokens": 9}, "`messages[0].content` is missing."),
        (
            "messages",
            {"messages": [{"role": "user", "content": []}], "max_tokens": 9},
            "`messages[0].content` is empty.",
        ),
        ("responses", {"input": [{"role": "user"}]}, "`input[0].content` is missing."),
        ("responses", {"input": [{"role": "user", "content": None}]}, "`input[0].content` is missing."),
    ],
)
def test_other_turns_have_content(path: str, fields: Fields, sentence: str, gateway: scripted.Gateway) -> None:
    answer = gateway.ask("POST", f"/v1/{path}", {"model": "tiny", **fields})
    assert answer.status == 400
    assert sentence in answer.json["error"]["message"]
