"""Keeps responses in the memory of one process, within a byte budget."""

from saccade.byte_lru import TenantLru
from saccade.errors import (
    InvalidValue,
    PreviousResponseNotFound,
    RequestError,
    ResponseNotFound,
)
from saccade.gateway.apis.responses.store import (
    ENTRY_BYTES,
    ResponseStore,
    StoredResponse,
    fits_store,
    missing_response,
    num_message_bytes,
)
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.field_schemas import MAX_MESSAGES
from saccade.gateway.memory_parts import MemoryPart


class MemoryResponseStore(ResponseStore):
    """Holds at most *budget_bytes* of responses."""

    def __init__(self, budget_bytes: int) -> None:
        self._responses: TenantLru[str, StoredResponse] = TenantLru(budget_bytes)
        self.memory_part = MemoryPart("responses", budget_bytes, lambda: self._responses.num_bytes)

    @property
    def is_away(self) -> bool:
        return False

    def takes(self, num_bytes: int) -> bool:
        return fits_store(num_bytes, self._responses.budget_bytes)

    async def put(self, tenant: bytes, response_id: str, response: StoredResponse) -> bool:
        num_bytes = len(response.body) + num_message_bytes(response.messages)
        if not self.takes(num_bytes):
            return False
        self._responses.put(tenant, response_id, response, num_bytes + ENTRY_BYTES)
        # The tenant with the most bytes may lose the response that it has just added.
        return response_id in self._responses.of_tenant(tenant)

    async def body(self, tenant: bytes, response_id: str) -> bytes:
        return self._find(tenant, response_id).body

    async def delete(self, tenant: bytes, response_id: str) -> None:
        self._find(tenant, response_id)
        self._responses.pop(tenant, response_id)

    async def conversation(self, tenant: bytes, response_id: str) -> list[ChatMessage]:
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
            raise missing_response(missing, param)
        return response
