"""Draws conversations for canaries: workers that get a share of the conversations, to try a release or a setting."""

from blake3 import blake3

from saccade.fleet.prompt import Prompt
from saccade.identity.content import framed

DRAW_BYTES = 6
"""A float has room for all of them."""

CONTEXT = "saccade 2026 draw of a conversation for canaries"


def draw(model: str, prompt: Prompt) -> float:
    """Return a number from 0 to 1, without 1: the same for all turns of a conversation, and at every gateway.

    A canary's conversations are those below its share.
    """
    conversation = prompt.conversation or prompt.beginning_key(b"")
    parts = (prompt.tenant, model.encode(), conversation)
    digest = blake3(framed(parts), derive_key_context=CONTEXT).digest(DRAW_BYTES)
    return int.from_bytes(digest, "little") / (1 << 8 * DRAW_BYTES)
