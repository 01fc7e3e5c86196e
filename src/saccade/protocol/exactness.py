"""How exactly a gateway knows which parts of a prompt a worker's KV cache holds."""

from typing import Literal

import msgspec

Level = Literal["EXACT", "DEGRADED", "TEXT_PREFIX", "NONE"]

LEVELS: tuple[Level, ...] = ("NONE", "TEXT_PREFIX", "DEGRADED", "EXACT")
"""From the least to the most."""


class Exactness(msgspec.Struct, frozen=True):
    """Which cached blocks of a prompt a gateway knows of, and why it does not know them all.

    - EXACT: every block.
    - DEGRADED: the reported blocks. The worker may hold more, or reuse less.
    - TEXT_PREFIX: blocks before the first image.
    - NONE: no block.

    *reason* says why the level is not EXACT.
    """

    level: Level
    reason: str = ""


EXACT, NOTHING = Exactness("EXACT"), Exactness("NONE")


def least(*known: Exactness) -> Exactness:
    """Return the first of those with the lowest level."""
    return min(known, key=lambda one: LEVELS.index(one.level))
