"""Keeps responses in the gateway's database."""

import msgspec

from saccade.errors import InvalidValue, PreviousResponseNotFound, StoreUnavailable
from saccade.gateway.apis.responses.store import (
    ResponseStore,
    StoredResponse,
    fits_store,
    missing_response,
    num_message_bytes,
)
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.field_schemas import MAX_MESSAGES
from saccade.gateway.state.items import Item
from saccade.gateway.state.rows import RESPONSE
from saccade.gateway.state.state import State


class StateResponseStore(ResponseStore):
    """Keeps responses in *state* for *keep_seconds* after they were last continued.

    A conversation may take *budget_bytes*, and a response a part of them.
    """

    def __init__(self, state: State, budget_bytes: int, keep_seconds: int) -> None:
        self._state = state
        self._budget_bytes = budget_bytes
        self._keep_seconds = keep_seconds

    @property
    def is_away(self) -> bool:
        return self._state.is_away

    def takes(self, num_bytes: int) -> bool:
        return fits_store(num_bytes, self._budget_bytes)

    async def put(self, tenant: bytes, response_id: str, response: StoredResponse) -> bool:
        if not self.takes(len(response.body) + num_message_bytes(response.messages)):
            return False
        expires_at = self._state.items.now() + self._keep_seconds
        messages = msgspec.json.encode(response.messages)
        item = Item(response_id, response.body, messages, expires_at, response.previous)
        try:
            return await self._state.items.put(tenant, RESPONSE, item)
        except StoreUnavailable:
            return False

    async def body(self, tenant: bytes, response_id: str) -> bytes:
        body = await self._state.items.head(tenant, RESPONSE, response_id)
        if body is None:
            raise missing_response()
        return body

    async def delete(self, tenant: bytes, response_id: str) -> None:
        if not await self._state.items.delete(tenant, RESPONSE, response_id):
            raise missing_response()

    async def conversation(self, tenant: bytes, response_id: str) -> list[ChatMessage]:
        param = "previous_response_id"
        chain = await self._state.items.chain(tenant, RESPONSE, response_id, self._budget_bytes)
        if chain.is_long:
            raise InvalidValue(
                f"`{param}`: the conversation has too many turns, or more than {self._budget_bytes} bytes.", param
            )
        if not chain.is_whole:
            raise missing_response(PreviousResponseNotFound, param)
        try:
            parts = [msgspec.json.decode(body, type=list[ChatMessage]) for body in reversed(chain.bodies)]
        except msgspec.ValidationError as error:
            # Another release has stored it, with messages that this one does not know.
            raise missing_response(PreviousResponseNotFound, param) from error
        messages = [message for part in parts for message in part]
        if len(messages) > MAX_MESSAGES:
            raise InvalidValue(f"`{param}`: the conversation has more than {MAX_MESSAGES} messages.", param)
        return messages
