"""Conversations that later requests continue: responses by tenant and id, in memory, within a bound of bytes."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade.byte_lru import ByteLru
from saccade.errors import InvalidValue, ResponseNotFound
from saccade.gateway.openai.requests import MAX_MESSAGES, ChatMessage, ImageUrl

ENTRY_BYTES = 1024
"""What a response takes besides its texts and pictures, and what each message and part takes."""


@dataclass(frozen=True)
class StoredResponse:
    """The messages that a request added to those of the response *previous*, with its answer; *body* is its JSON.

    Both ends of a request are kept apart from its instructions, which hold for one request only.
    """

    previous: str | None
    messages: tuple[ChatMessage, ...]
    body: bytes = b""


class ResponseStore:
    """Responses of all tenants, of *budget_bytes* together; the least recently used are dropped."""

    def __init__(self, budget_bytes: int) -> None:
        self._responses: ByteLru[tuple[bytes, str], StoredResponse] = ByteLru(budget_bytes)

    def begin(self, tenant: bytes, response_id: str, previous: str | None, messages: Sequence[ChatMessage]) -> None:
        """Keep the *messages* of a request while it is answered. Nobody knows its id unless it is completed."""
        self._put(tenant, response_id, StoredResponse(previous, tuple(messages)))

    def complete(self, tenant: bytes, response_id: str, answer: Sequence[ChatMessage], body: bytes) -> None:
        """Add the *answer* to a response, and the JSON that describes it, unless it was dropped in the meantime."""
        begun = self._responses.peek((tenant, response_id))
        if begun is not None:
            self._put(tenant, response_id, replace(begun, messages=(*begun.messages, *answer), body=body))

    def end(self, tenant: bytes, response_id: str) -> None:
        """Forget a response whose request has ended, unless it was completed."""
        begun = self._responses.peek((tenant, response_id))
        if begun is not None and not begun.body:
            self._responses.pop((tenant, response_id))

    def body(self, tenant: bytes, response_id: str) -> bytes:
        """Return the JSON of a response. Raises ResponseNotFound."""
        return self._find(tenant, response_id, "response_id").body

    def delete(self, tenant: bytes, response_id: str) -> None:
        """Forget a response; those that continue it cannot be continued then. Raises ResponseNotFound."""
        self._find(tenant, response_id, "response_id")
        self._responses.pop((tenant, response_id))

    def conversation(self, tenant: bytes, response_id: str) -> list[ChatMessage]:
        """Return all messages up to a response. Raises ResponseNotFound, and InvalidValue for too many."""
        param = "previous_response_id"
        parts: list[tuple[ChatMessage, ...]] = []
        num_messages = 0
        previous: str | None = response_id
        while previous is not None:
            found = self._find(tenant, previous, param)
            parts.append(found.messages)
            num_messages += len(found.messages)
            if num_messages > MAX_MESSAGES or len(parts) > MAX_MESSAGES:
                raise InvalidValue(f"`{param}`: the conversation has more than {MAX_MESSAGES} messages.", param)
            previous = found.previous
        return [message for part in reversed(parts) for message in part]

    def _find(self, tenant: bytes, response_id: str, param: str) -> StoredResponse:
        found = self._responses.get((tenant, response_id))
        # One without a body is still being answered.
        if found is None or not found.body:
            raise ResponseNotFound(
                f"`{param}`: this response is not kept here, or no longer; send the whole conversation as `input`.",
                param,
            )
        return found

    def _put(self, tenant: bytes, response_id: str, response: StoredResponse) -> None:
        num_bytes = ENTRY_BYTES + len(response.body) + sum(map(_num_bytes, response.messages))
        self._responses.put((tenant, response_id), response, num_bytes)


def _num_bytes(message: ChatMessage) -> int:
    texts = [message.reasoning_content or ""]
    texts += [text for call in message.tool_calls or () for text in (call.function.name, call.function.arguments)]
    if isinstance(message.content, str):
        texts.append(message.content)
    else:
        for part in message.content or ():
            texts.append(part.text or "")
            texts.append(part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url or "")
    return ENTRY_BYTES * len(texts) + sum(map(sys.getsizeof, texts))
