"""Checks that every text of a request is in its prompt, so that no template drops one silently."""

from collections.abc import Collection, Iterator, Sequence
from json import dumps
from typing import Final

from saccade.errors import InvalidValue
from saccade.tokenization.messages import Message

FIRST_DISTANCE: Final = 256
HEAD_CHARACTERS: Final = 64
MAX_HEADS: Final = 16


def check_sent_texts(messages: Sequence[Message], prompt: str, end_of_reasoning: str, results_first: bool) -> None:
    """Raise an InvalidValue that names the first of *messages* with a text that *prompt* lacks.

    Texts must be in order, except for system turns, which a template may write at the beginning or in the last turn.
    Texts may be trimmed or escaped as in JSON. An assistant's text may lack everything before *end_of_reasoning*. With
    *results_first*, tool results come before the text of the turn that called the tools.
    """
    of_systems = of_others = 0
    for position in _in_written_order(messages) if results_first else range(len(messages)):
        message = messages[position]
        content, is_system = message["content"], message["role"] == "system"
        for text in [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]:
            end = _find_end(text, prompt, of_systems if is_system else of_others)
            if end < 0 and message["role"] == "assistant" and end_of_reasoning and end_of_reasoning in text:
                end = _find_end(text.rpartition(end_of_reasoning)[2], prompt, of_others)
            if end < 0:
                raise InvalidValue(
                    f"`messages[{position}].content`: the model's chat template leaves this text out, or a part of it. "
                    "Send it in a message of the role user, as one text.",
                    f"messages[{position}].content",
                )
            if is_system:
                of_systems = end
            else:
                of_others = end


def _in_written_order(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the positions of the turns; a turn with calls comes after the results of those calls."""
    caller: int | None = None
    for position, message in enumerate(messages):
        if caller is not None and message["role"] != "tool":
            yield caller
            caller = None
        if "tool_calls" in message:
            caller = position
        else:
            yield position
    if caller is not None:
        yield caller


def _find_end(text: str, prompt: str, start: int) -> int:
    """Search *prompt* for *text* from *start*. Return where *text* ends, or -1 if it is missing.

    Each text comes soon after the previous one, in a form that only the template knows. So all forms are searched for
    in a growing part of the prompt, and the time for all texts is linear in the prompt's length.
    """
    trimmed = text.strip()
    if not trimmed:
        return start
    distance = FIRST_DISTANCE
    escaped: Collection[str] | None = None
    while True:
        if (place := _find(trimmed, prompt, start, start + distance)) >= 0:
            return place + len(trimmed)
        escaped = _escaped_forms(trimmed) if escaped is None else escaped
        for form in escaped:
            if (place := _find(form, prompt, start, start + distance)) >= 0:
                return place + len(form)
        if start + distance >= len(prompt):
            return -1
        distance *= 4


def _escaped_forms(text: str) -> Collection[str]:
    """Return the JSON-escaped forms of *text* that differ from *text* itself."""
    return {dumps(text, ensure_ascii=False)[1:-1], dumps(text)[1:-1]} - {text}


def _find(form: str, prompt: str, start: int, stop: int) -> int:
    """Return the first place in [*start*, *stop*) at which *prompt* has *form*, or -1 if there is none.

    For a long text, `str.find` prepares for tenths of a second while it holds the GIL. The text's head alone is found
    at once, and the rest usually follows it.
    """
    head = form[:HEAD_CHARACTERS]
    for _ in range(MAX_HEADS):
        start = prompt.find(head, start, stop + len(head))
        if start < 0 or prompt.startswith(form, start):
            return start
        start += 1
    return prompt.find(form, start, stop + len(form))
