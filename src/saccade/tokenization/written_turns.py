"""Finds out which turns and texts a chat template writes, by rendering chats with texts that occur nowhere else.

Releases' templates differ in this. Qwen3-VL's writes only the first of several system turns, and Qwen3.5's refuses a
second one. Mistral Small's writes only the first text of a system turn. Others write a list of texts in Python's
notation.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from saccade.errors import InvalidValue
from saccade.tokenization.messages import Message

Render = Callable[[Sequence[Message]], str]
"""Returns the prompt of messages. Raises InvalidValue if the template refuses them."""

Place = tuple[str, str | None]
"""The roles before and after a system turn, None for the end of the chat."""

FIRST, SECOND = "13141592653589793", "23141592653589793"
"""Texts that no template writes by itself."""

_QUESTION: Final[Message] = {"role": "user", "content": "a"}
_ANSWER: Final[Message] = {"role": "assistant", "content": "b"}
RESULT: Final[Message] = {"role": "tool", "tool_call_id": "functions.f:0", "content": "c"}
"""The result of the first call of calling()."""


NAMED_ROLES: Final = ("system", "user", "assistant")
"""The roles whose `name` says who speaks; that of a result only repeats its function's."""


def calling(*arguments: str, content: str = "") -> list[Message]:
    """Return messages, the last of which has *content* and calls a function once for each of *arguments*."""
    calls = [
        {"id": f"functions.f:{number}", "type": "function", "function": {"name": "f", "arguments": {"a": argument}}}
        for number, argument in enumerate(arguments)
    ]
    return [_QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}]


_PLACES: Final[Mapping[Place, tuple[Sequence[Message], Sequence[Message]]]] = {
    ("user", None): ([_QUESTION], []),
    ("user", "user"): ([_QUESTION], [_QUESTION]),
    ("user", "assistant"): ([_QUESTION], [_ANSWER, _QUESTION]),
    ("assistant", None): ([_QUESTION, _ANSWER], []),
    ("assistant", "user"): ([_QUESTION, _ANSWER], [_QUESTION]),
    ("assistant", "assistant"): ([_QUESTION, _ANSWER], [_ANSWER, _QUESTION]),
    ("tool", None): ([*calling("a"), RESULT], []),
    ("tool", "user"): ([*calling("a"), RESULT], [_QUESTION]),
    ("tool", "assistant"): ([*calling("a"), RESULT], [_ANSWER, _QUESTION]),
}
"""The turns before and after a late system turn."""

_OF_ROLES: Final[Mapping[str, tuple[Sequence[Message], Message, Sequence[Message]]]] = {
    "system": ([], {"role": "system"}, [_QUESTION]),
    "user": ([], {"role": "user"}, []),
    "assistant": ([_QUESTION], {"role": "assistant"}, [_QUESTION]),
    "tool": (calling("a"), RESULT, []),
}
"""For each role: the turns before a turn of that role, its fields besides `content`, and the turns after it."""


@dataclass(frozen=True)
class WrittenTurns:
    """Which turns a template writes, and in what form.

    *systems*: a system turn at the beginning. *leading_systems*: more than one. *late_systems*: the places of system
    turns later in a chat. A turn of the *joined* roles is written whole only if its content is one string.
    *results_first*: tool results stand before the text of the turn with their calls. *argument_texts*: a call's
    arguments may be text instead of an object. *names*: the roles of turns whose `name` is written.
    """

    systems: bool = True
    leading_systems: bool = True
    late_systems: frozenset[Place] = frozenset(_PLACES)
    joined: frozenset[str] = frozenset()
    results_first: bool = False
    argument_texts: bool = True
    names: frozenset[str] = frozenset(NAMED_ROLES)


def find_written_turns(renders: Sequence[Render]) -> WrittenTurns:
    """Return the turns that a template writes in each of *renders*, such as one with tools and one without."""
    leading = [_system(FIRST), _system(SECOND), _QUESTION]
    return WrittenTurns(
        systems=_writes(renders, [_system(FIRST), _QUESTION], FIRST),
        leading_systems=_writes(renders, leading, FIRST, SECOND),
        late_systems=frozenset(place for place in _PLACES if _writes_at(renders, place)),
        joined=frozenset(role for role in _OF_ROLES if _must_join(renders, role)),
        results_first=any(map(_writes_results_first, renders)),
        argument_texts=_writes(renders, _calling_with_text(FIRST), FIRST),
        names=frozenset(role for role in NAMED_ROLES if _writes_name(renders, role)),
    )


def _writes_at(renders: Sequence[Render], place: Place) -> bool:
    before, after = _PLACES[place]
    late = [_system(FIRST), _system(SECOND)]
    chats = ([*before, *late, *after], [_system("d"), *before, *late, *after])
    return all(_writes(renders, chat, FIRST, SECOND) for chat in chats)


def _must_join(renders: Sequence[Render], role: str) -> bool:
    """Return whether lists of texts lose something that a single string keeps."""
    before, turn, after = _OF_ROLES[role]
    parts = [{"type": "text", "text": text} for text in (FIRST, SECOND)]
    in_list, in_string = ([*before, {**turn, "content": content}, *after] for content in (parts, f"{FIRST}\n{SECOND}"))
    return not _writes(renders, in_list, FIRST, SECOND) and _writes(renders, in_string, FIRST, SECOND)


def _writes_name(renders: Sequence[Render], role: str) -> bool:
    before, turn, after = _OF_ROLES[role]
    return _writes(renders, [*before, {**turn, "content": SECOND, "name": FIRST}, *after], FIRST)


def _writes(renders: Sequence[Render], chat: Sequence[Message], *texts: str) -> bool:
    try:
        return all(has_texts(render(chat), *texts) for render in renders)
    except InvalidValue:
        return False


def has_texts(prompt: str, *texts: str) -> bool:
    """Return whether *prompt* has all of *texts* in this order, but not as a list in Python's or JSON's notation."""
    in_order = re.search(".*".join(texts), prompt, re.DOTALL)
    return in_order is not None and not re.search(f"['\"]text['\"]: *['\"](?:{'|'.join(texts)})", prompt)


def _writes_results_first(render: Render) -> bool:
    chat = [*calling("a", content=FIRST), {**RESULT, "content": SECOND}]
    try:
        prompt = render(chat)
    except InvalidValue:
        return False
    return -1 < prompt.find(SECOND) < prompt.find(FIRST)


def _calling_with_text(arguments: str) -> list[Message]:
    question, turn = calling("a")
    [call] = turn["tool_calls"]
    return [question, {**turn, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}]


def _system(text: str) -> Message:
    return {"role": "system", "content": text}
