"""Stores responses, so that later requests can continue their conversations."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from saccade.byte_lru import TenantLru
from saccade.errors import (
    InvalidValue,
    PreviousResponseNotFound,
    RequestError,
    ResponseNotFound,
    UnsupportedParameter,
)
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.field_schemas import MAX_MESSAGES
from saccade.gateway.memory_parts import MemoryPart

ENTRY_BYTES = 1024
"""Memory of a response besides its messages and its JSON."""

LARGEST_PART = 4
"""A conversation over this fraction of the store is not stored: it would displace many others."""


@dataclass(frozen=True)
class StoredResponse:
    """The messages that a request and its answer added after the response *previous*; *body* is the response's JSON.

    Instructions are not among the messages: they apply to one request only.
    """

    previous: str | None
    messages: tuple[ChatMessage, ...]
    body: bytes


def num_message_bytes(messages: Iterable[ChatMessage]) -> int:
    """Return how many bytes of memory *messages* take."""
    return sum(map(_num_bytes, messages))


class ResponseStore:
    """Keeps the responses of all tenants, so that later requests can continue them. Holds at most *budget_bytes*."""

    def __init__(self, budget_bytes: int) -> None:
        self._responses: TenantLru[str, StoredResponse] = TenantLru(budget_bytes)
        self.memory_part = MemoryPart("responses", budget_bytes, lambda: self._responses.num_bytes)

    def takes(self, num_bytes: int) -> bool:
        """Return whether a response with *num_bytes* of messages and JSON is small enough to store.

        Called with the size of the messages alone, it finds responses that will be too large, before they exist.
        """
        return num_bytes + ENTRY_BYTES <= self._responses.budget_bytes // LARGEST_PART

    def put(self, tenant: bytes, response_id: str, response: StoredResponse) -> bool:
        """Store a complete response if it is small enough. Return whether it is stored."""
        num_bytes = len(response.body) + num_message_bytes(response.messages)
        if not self.takes(num_bytes):
            return False
        self._responses.put(tenant, response_id, response, num_bytes + ENTRY_BYTES)
        # The tenant with the most bytes may lose the response that it has just added.
        return response_id in self._responses.of_tenant(tenant)

    def body(self, tenant: bytes, response_id: str) -> bytes:
        """Return a response as JSON. Raises ResponseNotFound."""
        return self._find(tenant, response_id).body

    def delete(self, tenant: bytes, response_id: str) -> None:
        """Delete a response. Later responses in its conversation can no longer be continued.

        Raises ResponseNotFound.
        """
        self._find(tenant, response_id)
        self._responses.pop(tenant, response_id)

    def conversation(self, tenant: bytes, response_id: str) -> list[ChatMessage]:
        """Return all messages of a conversation, up to and including those of a response.

        Raises PreviousResponseNotFound, and InvalidValue if there are too many messages.
        """
        param = "previous_response_id"
        parts: list[tuple[ChatMessage, ...]] = []
        num_messages = 0
        previous: str | None = response_id
        while previous is not None:
            response = self._find(tenant, previous, PreviousResponseNotFound, param)
            parts.append(response.messages)
            num_messages += len(response.messages)
            if num_messages > MAX_MESSAGES or len(parts) > MAX_MESSAGES:
                raise InvalidValue(f"`{param}`: the conversation has more than {MAX_MESSAGES} messages.", param)
            previous = response.previous
        return [message for part in reversed(parts) for message in part]

    def _find(
        self,
        tenant: bytes,
        response_id: str,
        missing: type[RequestError] = ResponseNotFound,
        param: str = "response_id",
    ) -> StoredResponse:
        response = self._responses.of_tenant(tenant).get(response_id)
        if response is None:
            raise missing(
                f"`{param}`: this response is not kept here, or no longer; send the whole conversation as `input`.",
                param,
            )
        return response


def _num_bytes(value: object) -> int:
    """Return how many bytes of memory a message, or any value in one, takes."""
    if isinstance(value, msgspec.Struct):
        inside = [item for item in msgspec.structs.astuple(value) if item is not None and item is not UNSET]
    else:
        inside = value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(map(_num_bytes, inside))


@dataclass(frozen=True)
class Destination:
    """The *store* for a complete response, and the *messages* that its request adds after the response *previous*."""

    store: ResponseStore
    tenant: bytes
    previous: str | None
    messages: Sequence[ChatMessage]


def required_store(store: ResponseStore | None, param: str) -> ResponseStore:
    """Return *store*, which the field *param* needs. Raises UnsupportedParameter if the gateway keeps no responses."""
    if store is None:
        raise UnsupportedParameter(
            f"`{param}`: this gateway keeps no responses, because of --response-store-bytes 0 or of "
            "--gateway-processes over 1; send the whole conversation as `input`.",
            param,
        )
    return store
