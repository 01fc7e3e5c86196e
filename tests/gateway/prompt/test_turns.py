"""Turns take a form that the model's template writes, and no text of a request is left out of its prompt. F13"""

from contextlib import nullcontext
from typing import Any

import pytest
from checkpoints import templates
from tables import table

from saccade.errors import InvalidValue
from saccade.gateway.prompt.sent_texts import check_sent_texts
from saccade.gateway.prompt.turns import MOVED, rewrite_turns
from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.written_turns import WrittenTurns

Turns = list[dict[str, Any]]
IMAGE = {"type": "image"}
FUNCTION = {"name": "f", "arguments": {}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "r"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def turn(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def system(*parts: Any) -> dict[str, Any]:
    return turn("system", *parts)


def user(*parts: Any) -> dict[str, Any]:
    return turn("user", *parts)


ANSWER = turn("assistant", "b")
FIRST_ONLY = WrittenTurns(leading_systems=False, late_systems=frozenset())
NO_SYSTEMS = WrittenTurns(systems=False, leading_systems=False, late_systems=frozenset())


@table(
    "sent, rewritten",
    [
        ([system("s"), user("u")], [system("s"), user("u")]),
        ([system("s"), system("t"), user("u")], [system("s\n\nt"), user("u")]),
        ([system(text("s"), text("t")), system("v"), user("u")], [system(text("s"), text("t\n\nv")), user("u")]),
        ([system("s"), system(IMAGE), user("u")], [system(text("s\n\n"), IMAGE), user("u")]),
        ([user("u"), system("s")], [user("u\n\ns")]),
        ([user("u"), system("s"), system("t"), user("v")], [user("u\n\ns\n\nt"), user("v")]),
        ([user("u"), system("s"), ANSWER, user("v")], [user("u\n\ns"), ANSWER, user("v")]),
        ([user("u"), ANSWER, system("s"), user("v")], [user("u"), ANSWER, user("s\n\nv")]),
        ([user("u"), ANSWER, system("s")], [user("u"), ANSWER, user("s")]),
        ([user("u"), ANSWER, system("s"), ANSWER], [user("u"), ANSWER, user("s"), ANSWER]),
        ([user("u"), CALLS, RESULT, system("s"), ANSWER], [user("u"), CALLS, RESULT, user("s"), ANSWER]),
        ([user("u"), CALLS, system("s"), RESULT, system("t")], [user("u"), CALLS, RESULT, user("s\n\nt")]),
        ([user("u"), CALLS, system("s"), RESULT, user("v")], [user("u"), CALLS, RESULT, user("s\n\nv")]),
        ([user(text("u"), IMAGE), system("s")], [user(text("u"), IMAGE, text("\n\ns"))]),
        ([user(IMAGE), system("s")], [user(IMAGE, text("\n\ns"))]),
        ([user(IMAGE, text("u")), system("s")], [user(IMAGE, text("u\n\ns"))]),
        ([ANSWER, system("s"), user(IMAGE, text("u"))], [ANSWER, user(text("s\n\n"), IMAGE, text("u"))]),
    ],
)
def test_late_system_turns_stand_where_they_were_said(sent: Turns, rewritten: Turns) -> None:
    turns, warning = rewrite_turns(sent, FIRST_ONLY)
    assert turns == rewritten
    late = any(
        one["role"] == "system" and any(other["role"] != "system" for other in sent[:at]) for at, one in enumerate(sent)
    )
    assert warning == (MOVED if late else "")


@table(
    "sent, rewritten",
    [
        ([system("s"), user("u")], [user("s\n\nu")]),
        ([system("s"), ANSWER, user("u")], [user("s"), ANSWER, user("u")]),
        ([system("s")], [system("s")]),
    ],
)
def test_without_system_turns_users_say_it(sent: Turns, rewritten: Turns) -> None:
    turns, warning = rewrite_turns(sent, NO_SYSTEMS)
    assert (turns, warning) == (rewritten, MOVED if turns != sent else "")


def test_a_template_that_writes_turns_gets_them_as_they_are() -> None:
    sent: Turns = [
        system("s"),
        system(text("t")),
        user("u"),
        system("v"),
        CALLS,
        RESULT,
        system("w"),
        user(IMAGE, text("x")),
    ]
    assert rewrite_turns(sent, WrittenTurns()) == (sent, "")


def test_lists_of_texts_become_one_string() -> None:
    joined = WrittenTurns(joined=frozenset(("system", "tool")))
    sent: Turns = [
        system(text("s"), text(""), text("t")),
        user(text("u"), text("v")),
        {**RESULT, "content": [text("a"), IMAGE]},
    ]
    assert rewrite_turns(sent, joined) == ([system("s\n\nt"), *sent[1:]], "")


def calls(*arguments: Any, content: Any = "c") -> dict[str, Any]:
    made = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


@table(
    "sent, rewritten",
    [
        (calls({"a": 1}), calls({"a": 1})),
        (calls('{"a": '), calls(content='c\n\nf({"a": )')),
        (calls("[", {"a": 1}, "]"), calls({"a": 1}, content="c\n\nf([)\nf(])")),
        (calls("[", content=""), calls(content="f([)")),
        (calls("[", content=[text("c")]), calls(content="c\n\nf([)")),
    ],
)
def test_arguments_that_are_no_object(sent: dict[str, Any], rewritten: dict[str, Any]) -> None:
    assert rewrite_turns([sent], WrittenTurns(argument_texts=False)) == ([rewritten], "")
    assert rewrite_turns([sent], WrittenTurns()) == ([sent], "")


@table("source", [templates.QWEN3, templates.QWEN3_5, templates.MISTRAL3, templates.GEMMA4, templates.LLAVA_NEXT])
@table("late", [[], [system("late")], [system(text("late"), text("later"))]])
def test_the_next_prompt_begins_with_this_one(source: str, late: Turns) -> None:
    template = ChatTemplate(source, [], {"bos_token": "<s>", "eos_token": "</s>"})
    chat: Turns = [system("s"), system("t"), user("u"), *late]
    prompts = []
    for messages in (chat, [*chat, ANSWER, system("again"), user("v")]):
        turns, _ = rewrite_turns(messages, template.turns)
        prompts.append("".join(s.text for s in template.render(turns, add_generation_prompt=False)))
        check_sent_texts(messages, prompts[-1], "</think>", template.turns.results_first)
    assert prompts[1].startswith(prompts[0])


@table(
    "sent, prompt, lost",
    [
        ([user("u"), ANSWER], "u b", None),
        ([user("u"), ANSWER], "b u", 1),
        ([user("u"), user("u")], "u", 1),
        ([user(text("u"), IMAGE, text("v"))], "u", 0),
        ([user("u"), system("s")], "s u", None),
        ([system("s"), user("u"), system("s")], "s u", 2),
        ([user(" u\n"), user(" \n"), ANSWER], "ub", None),
        ([user('"é"\n1')], r"\"é\"\n1", None),
        ([user('"é"\n1')], r"\"\u00e9\"\n1", None),
        ([turn("assistant", "<think>h</think>b")], "b", None),
        ([turn("assistant", "<think>h</think>b")], "h", 0),
        ([user("<think>h</think>b")], "b", 0),
        ([{**CALLS, "content": "c"}, RESULT, user("u")], "r c u", 1),
    ],
)
def test_every_text_is_looked_for(sent: Turns, prompt: str, lost: int | None) -> None:
    refusal = nullcontext() if lost is None else pytest.raises(InvalidValue, match="leaves this text out")
    with refusal as raised:
        check_sent_texts(sent, prompt, "</think>", results_first=False)
    assert raised is None or raised.value.param == f"messages[{lost}].content"


def test_results_may_stand_before_the_text_of_their_turn() -> None:
    sent: Turns = [{**CALLS, "content": "c"}, RESULT, {**RESULT, "content": "q"}, {**CALLS, "content": "d"}]
    check_sent_texts(sent, "r q c d", "", results_first=True)
    with pytest.raises(InvalidValue):
        check_sent_texts(sent, "r c q d", "", results_first=True)
