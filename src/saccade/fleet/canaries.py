"""Draws conversations for canaries: workers that get a share of the conversations, to try a release or a setting."""

from blake3 import blake3

from saccade.fleet.prompt import Prompt
from saccade.identity.blocks import block_key

BEGINNING_TOKENS = 256
"""A prompt that belongs to no conversation is known by this many tokens of its beginning."""

DRAW_BYTES = 6
"""A float has room for all of them."""

CONTEXT = "saccade 2026 draw of a conversation for canaries"


def draw(model: str, prompt: Prompt) -> float:
    """Return a number from 0 to 1, without 1: the same for all turns of a conversation, and at every gateway.

    A canary's conversations are those below its share.
    """
    conversation = prompt.conversation or block_key(b"", prompt.token_ids[:BEGINNING_TOKENS], 0, ())
    parts = (prompt.tenant, model.encode(), conversation)
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    digest = blake3(framed, derive_key_context=CONTEXT).digest(DRAW_BYTES)
    return int.from_bytes(digest, "little") / (1 << 8 * DRAW_BYTES)
