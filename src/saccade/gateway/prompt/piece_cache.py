"""A cache of token ids for texts that repeat, such as the beginning of a conversation."""

import threading
from array import array
from collections.abc import Callable, Sequence

from blake3 import blake3

from saccade.byte_lru import TenantLru
from saccade.gateway.memory_parts import MemoryPart

PIECES_BYTES = 32 << 20
"""Of token ids of texts that are kept for the next turns of long chats: four bytes for each token."""

PIECE_BYTES = 256
"""Bytes of one of them besides its ids, at most."""


class PieceCache:
    """Caches token ids per tenant, so that the time a prompt takes tells a tenant nothing about others."""

    def __init__(self, budget_bytes: int) -> None:
        self._ids: TenantLru[bytes, array[int]] = TenantLru(budget_bytes)
        self._lock = threading.Lock()
        self.memory_part = MemoryPart("prompt_pieces", budget_bytes, lambda: self._ids.num_bytes)

    def encode(
        self, salt: bytes, tokenizer: bytes, texts: Sequence[str], encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Return the token ids of all *texts*, in order.

        Ids of texts that the tenant with *salt* has used are cached; *encode* makes the rest. *tokenizer* names the
        tokenizer. Several threads may call this at the same time.
        """
        token_ids: list[int] = []
        for text in texts:
            key = blake3(tokenizer).update(text.encode(errors="surrogatepass")).digest()
            with self._lock:
                ids = self._ids.of_tenant(salt).get(key)
            if ids is None:
                ids = array("I", encode(text))
                with self._lock:
                    self._ids.put(salt, key, ids, PIECE_BYTES + ids.itemsize * len(ids))
            token_ids += ids
        return token_ids
