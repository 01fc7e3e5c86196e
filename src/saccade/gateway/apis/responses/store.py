"""What a store of responses does. With it, later requests can continue the conversations of earlier ones."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET

from saccade.errors import RequestError, ResponseNotFound, UnsupportedParameter
from saccade.gateway.chat_request import ChatMessage

ENTRY_BYTES = 1024
"""Memory of a response besides its messages and its JSON."""

LARGEST_PART = 4
"""A response over this fraction of the store is not stored: it would displace many others."""


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


def _num_bytes(value: object) -> int:
    """Return how many bytes of memory a message, or any value in one, takes."""
    if isinstance(value, msgspec.Struct):
        inside = [item for item in msgspec.structs.astuple(value) if item is not None and item is not UNSET]
    else:
        inside = value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(map(_num_bytes, inside))


def fits_store(num_bytes: int, budget_bytes: int) -> bool:
    """Return whether a store of *budget_bytes* takes a response with *num_bytes* of messages and JSON."""
    return num_bytes + ENTRY_BYTES <= budget_bytes // LARGEST_PART


def missing_response(kind: type[RequestError] = ResponseNotFound, param: str = "response_id") -> RequestError:
    """Return the error for a response that *param* names and the store does not have."""
    return kind(
        f"`{param}`: this response is not kept here, or no longer; send the whole conversation as `input`.", param
    )


class ResponseStore(Protocol):
    """Keeps the responses of all tenants. No method finds another tenant's response.

    Coroutines other than put() raise StoreUnavailable if the responses are in a database that does not answer.
    """

    @property
    def is_away(self) -> bool:
        """Whether nothing could be stored when this was last tried."""

    def takes(self, num_bytes: int) -> bool:
        """Return whether a response with *num_bytes* of messages and JSON is small enough to store.

        Called with the size of the messages alone, it finds responses that will be too large, before they exist.
        """

    async def put(self, tenant: bytes, response_id: str, response: StoredResponse) -> bool:
        """Store a complete response if it is small enough. Return whether it is stored."""

    async def body(self, tenant: bytes, response_id: str) -> bytes:
        """Return a response as JSON. Raises ResponseNotFound."""

    async def delete(self, tenant: bytes, response_id: str) -> None:
        """Delete a response. Later responses in its conversation can no longer be continued.

        Raises ResponseNotFound.
        """

    async def conversation(self, tenant: bytes, response_id: str) -> list[ChatMessage]:
        """Return all messages of a conversation, up to and including those of a response.

        Raises PreviousResponseNotFound, and InvalidValue if there are too many messages.
        """


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
            f"`{param}`: this gateway keeps no responses, because of --response-store-bytes 0, or of "
            "--gateway-processes over 1 without --state; send the whole conversation as `input`.",
            param,
        )
    return store
