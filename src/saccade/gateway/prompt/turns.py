"""Rewrites turns into a form that the template writes, so that every text of a request is in its prompt.

Loading a template shows which turns it would drop (tokenization/written_turns.py). These turns are rewritten:

- System turns at the beginning become one, in order, with a blank line between them.
- A later system turn becomes text in the user's turn before it, else in the one after it, else in a new one. So it
  keeps its place, and the next request's prompt begins with this one's.
- A list of texts becomes one string, with a line for each text.
- A call whose arguments are not a JSON object becomes text of its turn, if the template takes only objects.

A template that drops nothing gets the turns unchanged.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from saccade.tokenization.messages import Message
from saccade.tokenization.written_turns import NAMED_ROLES, WrittenTurns

MOVED = "this model's chat template does not write all system turns; their text stands in turns of the user"


NAMES = "`name` of messages has no effect: this model's chat template does not write who speaks"

Content = str | list[dict[str, str]]


def rewrite_turns(messages: Sequence[Message], form: WrittenTurns) -> tuple[list[Message], str]:
    """Return *messages* in a *form* that the template writes, and a warning or ""."""
    turns: list[Message] = []
    pending: list[Message] = []
    position, warning = 0, ""
    for role, run in groupby(messages, key=itemgetter("role")):
        group = list(run)
        position += len(group)
        if role != "system" and not pending:
            turns += group
        elif role != "system":
            for message in group:
                pending = _add_turn(turns, pending, message)
        elif not pending and _is_written(turns, messages[position]["role"] if position < len(messages) else None, form):
            turns += group if turns or form.leading_systems else [_join_turns(group, "system")]
        else:
            pending, warning = [*pending, *group], MOVED
            if turns and turns[-1]["role"] == "user":
                turns[-1], pending = _join_turns([turns[-1], *pending], "user"), []
    if pending:
        turns.append(_join_turns(pending, "user"))
    if not form.argument_texts:
        turns = [_write_texts_of_calls(turn) if "tool_calls" in turn else turn for turn in turns]
    lost = set(NAMED_ROLES) - form.names
    warnings = [warning] + [NAMES] * any(message.get("name") and message["role"] in lost for message in messages)
    return [_join_list(turn) if turn["role"] in form.joined else turn for turn in turns], "; ".join(
        filter(None, warnings)
    )


def _is_written(before: Sequence[Message], role_after: str | None, form: WrittenTurns) -> bool:
    """Return whether the template writes system turns between the turns *before* and a turn of *role_after*."""
    if not before:
        return form.systems or role_after is None
    return (before[-1]["role"], role_after) in form.late_systems


def _add_turn(turns: list[Message], pending: list[Message], message: Message) -> list[Message]:
    """Append *message* to *turns*, and merge the *pending* turns into it or put them before it.

    Return the turns that are still pending. None may come before a tool result, which must directly follow its call.
    """
    if not pending or message["role"] == "tool":
        turns.append(message)
        return pending
    if message["role"] == "user":
        turns.append(_join_turns([*pending, message], "user"))
    else:
        turns += [_join_turns(pending, "user"), message]
    return []


def _join_turns(turns: Sequence[Message], role: str) -> Message:
    """Return one turn of *role* with the contents of *turns*, and the other fields of the last turn of that role."""
    fields = next((turn for turn in reversed(turns) if turn["role"] == role), {})
    content = turns[0]["content"]
    for turn in turns[1:]:
        content = _join_contents(content, turn["content"])
    return {**fields, "role": role, "content": content}


def _join_contents(first: Content, second: Content) -> Content:
    """Return both contents with a blank line between their texts."""
    *before, last = _parts(first)
    following, *after = _parts(second)
    if "text" in last and "text" in following:
        seam = [_text(f"{last['text']}\n\n{following['text']}")]
    elif "text" in last:
        seam = [_text(f"{last['text']}\n\n"), following]
    elif "text" in following:
        seam = [last, _text(f"\n\n{following['text']}")]
    else:
        seam = [last, following]
    parts = [*before, *seam, *after]
    return parts if len(parts) > 1 else parts[0]["text"]


def _parts(content: Content) -> list[dict[str, str]]:
    return [_text(content)] if isinstance(content, str) else content or [_text("")]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _join_list(message: Message) -> Message:
    """Return *message* with a list of texts joined into one string."""
    content = message["content"]
    if isinstance(content, str) or any("text" not in part for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _write_texts_of_calls(turn: Message) -> Message:
    """Return *turn* with each call whose arguments are text moved into its content."""
    functions = [call["function"] for call in turn["tool_calls"]]
    texts = [f"{one['name']}({one['arguments']})" for one in functions if isinstance(one["arguments"], str)]
    if not texts:
        return turn
    calls = [call for call in turn["tool_calls"] if not isinstance(call["function"]["arguments"], str)]
    rest = {key: value for key, value in turn.items() if key != "tool_calls"} | ({"tool_calls": calls} if calls else {})
    content = "\n".join(texts)
    return {**rest, "content": _join_contents(turn["content"], content) if turn["content"] else content}
