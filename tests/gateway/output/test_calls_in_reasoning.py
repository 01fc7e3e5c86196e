"""A whole call within the reasoning ends the reasoning and is a call; a tag that is mentioned stays reasoning. # F13"""

import json
from collections.abc import Callable
from typing import Any

import scripted
from tables import table
from written_answers import FORMS, TOOLS, Call, Form, ids_of, read

from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.output import FinishReason

Models = Callable[[str], ServedModel]
ONE: Call = ("look", {"text": "a b", "count": 3})
TWO: Call = ("look", {"list": [1, 2]})
THOUGHT = "First I look there.\n\n"


def thinking(form: Form, opened_by: str, text: str) -> dict[str, Any]:
    """An answer that begins with reasoning, which the prompt or the answer opens."""
    return {"text": form.thinks + text} if opened_by == "answer" else {"text": text, "prompt": form.thinks}


@table("name", FORMS)
@table("opened_by", ["answer", "prompt"])
@table(
    ("after", "content", "calls"),
    [
        ("{one}", "", [ONE]),
        ("{both}", "", [ONE, TWO]),
        ("{one}\nThen:\n{two}", "Then:", [ONE, TWO]),
        ("{one}\nI wait.", "I wait.", [ONE]),
        ("{one}\nI wait.{end}\n\nNow.", "I wait.\n\nNow.", [ONE]),
        ("{one}{end}\n\n", "", [ONE]),
        ("{one}{end}\n\n{two}", "", [ONE, TWO]),
        ("{one}\n{opening} is how I began.{end}", "{opening} is how I began.", [ONE]),
    ],
)
def test_a_call_ends_the_reasoning(
    name: str, opened_by: str, after: str, content: str, calls: list[Call], models: Models
) -> None:
    model, form = models(name), FORMS[name]
    if form.model == "gemma4" and opened_by == "prompt":
        return  # Its templates do not open the reasoning, its models do.
    parts = {
        "one": form.calls(ONE),
        "two": form.calls(TWO),
        "both": form.calls(ONE, TWO),
        "end": form.end_of_thought,
        "opening": form.tags[0],
    }
    answer = thinking(form, opened_by, THOUGHT + after.format(**parts))
    seen = read(model, **answer, skip_special_tokens=False)
    assert seen[:4] == (THOUGHT.strip(), content.format(**parts), calls, "tool_calls")
    header = ids_of(model, form.thinks)[1:] if opened_by == "answer" else []
    assert seen.num_reasoning_tokens == len(ids_of(model, THOUGHT)) + len(header)
    assert seen.num_tokens == len(ids_of(model, answer["text"]))


MENTIONS = ["{0}", "`{0}`", "{0} and {1}", "{0}{1}.", "{half}", "`{half}`", "{undeclared}", "{half} ... {undeclared}"]


@table("name", FORMS)
@table("mention", MENTIONS)
def test_a_mentioned_tag_stays_reasoning(name: str, mention: str, models: Models) -> None:
    model, form = models(name), FORMS[name]
    call = form.write(*ONE)
    mentioned = mention.format(*form.tags, half=call[: call.index("a b")], undeclared=form.write("book", {"a": "b"}))
    if name == "kimi_k2" and mention == "{0}{1}.":
        return  # An empty pair of Kimi's tags is left out.
    thought = f"A call is {mentioned} like that."
    answer = form.thinks + thought + form.end_of_thought
    seen = read(model, f"{answer}\n\nAsk me.", skip_special_tokens=False)
    assert seen[:4] == (thought, "Ask me.", [], "stop")
    seen = read(model, f"{answer}\n\n{form.calls(ONE, TWO)}", skip_special_tokens=False)
    assert seen[:4] == (thought, "", [ONE, TWO], "tool_calls")
    seen = read(model, f"{form.thinks}{thought}\n{form.calls(ONE)}", skip_special_tokens=False)
    assert seen[:4] == (thought, "", [ONE], "tool_calls")


@table("name", FORMS)
@table("tools", [(), TOOLS[1:]])
def test_without_the_function_the_call_stays_reasoning(name: str, tools: Any, models: Models) -> None:
    model, form = models(name), FORMS[name]
    text = f"{THOUGHT}{form.calls(ONE)}"
    seen = read(model, form.thinks + text, tools=tools, skip_special_tokens=False)
    assert seen[:4] == (text, "", [], "stop")


@table("name", FORMS)
def test_a_value_may_hold_the_end_of_the_reasoning(name: str, models: Models) -> None:
    model, form = models(name), FORMS[name]
    call: Call = ("look", {"text": f"think, then {form.end_of_thought} and go"})
    seen = read(model, f"{form.thinks}{THOUGHT}{form.calls(call)}", skip_special_tokens=False)
    assert seen[:4] == (THOUGHT.strip(), "", [call], "tool_calls")


@table("name", FORMS)
@table("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_cut_call_stays_reasoning(name: str, finish: FinishReason, models: Models) -> None:
    model, form = models(name), FORMS[name]
    text = THOUGHT + form.calls(ONE)[: form.calls(ONE).index(" b")]
    seen = read(model, form.thinks + text, finish=finish, skip_special_tokens=False)
    assert seen[:4] == (text, "", [], finish.value)


STRICT = ({"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},)


@table("name", FORMS)
@table(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tools": STRICT},
    ],
)
def test_a_grammar_holds_the_calls_after_the_reasoning(name: str, fields: dict[str, Any], models: Models) -> None:
    """It cannot hold a call within the reasoning, and no answer ends there: a call that it holds follows."""
    model, form = models(name), FORMS[name]
    thought = f"{THOUGHT}{form.calls(ONE)}\nI call:"
    call: Call = ("look", {"text": "<think> or </think>"})
    text = f"{form.thinks}{thought}{form.end_of_thought}\n\n{form.calls(call)}"
    seen = read(model, text, skip_special_tokens=False, **fields)
    assert seen[:4] == (thought, "", [call], "tool_calls")


@table("name", FORMS)
def test_a_budget_ends_the_reasoning_before_a_call(name: str, models: Models) -> None:
    model, form = models(name), FORMS[name]
    num_tokens = len(ids_of(model, THOUGHT))
    text = f"{form.thinks}{THOUGHT}{form.end_of_thought}{form.calls(ONE)}"
    seen = read(model, text, thinking_token_budget=num_tokens)
    assert seen[:4] == (THOUGHT.strip(), "", [ONE], "tool_calls")


@table("stream", [False, True])
@table("shown", [None, False])
def test_a_chat_has_reasoning_and_calls(stream: bool, shown: bool | None, gateway: scripted.Gateway) -> None:
    num_tokens = gateway.answer_pieces("<think>", THOUGHT, "<tool_call>", HERMES, "</tool_call>")
    answer = gateway.chat(tools=TOOLS, include_reasoning=shown, **scripted.streamed(stream))
    assert answer.status == 200, answer.body
    events = answer.events[:-1] if stream else [answer.json]
    parts = [choice["delta" if stream else "message"] for event in events for choice in event["choices"]]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == ("" if shown is False else THOUGHT)
    assert not any(part.get("content") for part in parts)
    assert [call["function"]["name"] for part in parts for call in part.get("tool_calls") or ()] == ["look"]
    used = events[-1]["usage"]
    thought = len(gateway.tokenizer.encode_text(THOUGHT))
    assert (used["completion_tokens"], used["completion_tokens_details"]["reasoning_tokens"]) == (num_tokens, thought)


HERMES = '\n{"name": "look", "arguments": {"count": 3}}\n'


def events(answer: scripted.Answer) -> list[Any]:
    """The data of events that have names."""
    return [json.loads(line.removeprefix("data: ")) for line in answer.body.decode().splitlines() if "data: " in line]


@table("stream", [False, True])
def test_messages_and_responses_have_a_block_for_each(stream: bool, gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("<think>", THOUGHT, "<tool_call>", HERMES, "</tool_call>", "And?", "</think>", " Done.")
    function = TOOLS[0]["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, "tools": [tool], "stream": stream}
    answer = gateway.ask("POST", "/v1/messages", asked)
    assert answer.status == 200, answer.body
    if stream:
        blocks = [one["content_block"]["type"] for one in events(answer) if one["type"] == "content_block_start"]
    else:
        blocks = [block["type"] for block in answer.json["content"]]
    assert blocks == ["thinking", "tool_use", "text"]
    asked = {"input": "hi", "tools": [{"type": "function", **function}], "stream": stream}
    answer = gateway.ask("POST", "/v1/responses", asked)
    assert answer.status == 200, answer.body
    response = events(answer)[-1]["response"] if stream else answer.json
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call", "message"]
    assert response["output"][2]["content"][0]["text"].strip() == "And? Done."
