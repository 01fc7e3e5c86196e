"""The edits that Anthropic's servers would make to a conversation (`context_management`); this server makes none.

Chat templates already leave out the thinking of earlier turns. Clearing a tool's result would change the prompt from
that point on, so nothing after it could come from the prefix cache.
"""

from collections.abc import Iterator, Sequence

from saccade.gateway.apis.messages.wire import Edit, Keep, Message
from saccade.gateway.parameters import printable

KEPT_THINKING = 1
KEPT_CALLS = 3
"""What Anthropic's servers keep if an edit does not say."""


def ignored_edits(edits: Sequence[Edit], messages: Sequence[Message]) -> list[str]:
    """Return the types of the *edits* that might remove something from *messages*."""
    return [printable(edit.type) for edit in edits if _may_apply(edit, messages)]


def _may_apply(edit: Edit, messages: Sequence[Message]) -> bool:
    """Return whether *edit* could remove something.

    The edit's trigger is a number of tokens. Tokens are not counted yet, so the trigger is assumed to be reached.
    """
    if edit.type.startswith("clear_thinking"):
        turns = (set(_types(message)) for message in messages)
        return edit.keep != "all" and sum("thinking" in types for types in turns) > _num_kept(edit, KEPT_THINKING)
    if edit.type.startswith("clear_tool_uses"):
        return sum(kind == "tool_use" for message in messages for kind in _types(message)) > _num_kept(edit, KEPT_CALLS)
    return True


def _types(message: Message) -> Iterator[str]:
    """Yield the type of each block in *message*."""
    if not isinstance(message.content, str):
        yield from (block.type for block in message.content or ())


def _num_kept(edit: Edit, default: int) -> int:
    return edit.keep.value if isinstance(edit.keep, Keep) and edit.keep.value is not None else default
