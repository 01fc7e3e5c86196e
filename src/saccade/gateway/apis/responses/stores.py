"""Chooses where a gateway keeps responses."""

from saccade.gateway.apis.responses.memory_store import MemoryResponseStore
from saccade.gateway.apis.responses.state_store import StateResponseStore
from saccade.gateway.apis.responses.store import ResponseStore
from saccade.gateway.config import GatewayConfig
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.state.state import State


def response_store(config: GatewayConfig, state: State | None) -> tuple[ResponseStore | None, MemoryPart]:
    """Return the store of responses, or None if none are kept, and the part of the memory that it may fill.

    Responses are in *state*, or in memory if that is None.
    """
    num_bytes = config.response_store_bytes if config.keeps_what_is_sent else 0
    in_memory = MemoryResponseStore(num_bytes)
    if not num_bytes:
        return None, in_memory.memory_part
    if state is None:
        return in_memory, in_memory.memory_part
    return StateResponseStore(state, num_bytes, config.state.response_seconds), in_memory.memory_part
