"""How exactly a gateway can know which parts of a prompt a worker's KV cache holds."""

from typing import Literal

import msgspec

Level = Literal["EXACT", "DEGRADED", "TEXT_PREFIX", "NONE"]

LEVELS: tuple[Level, ...] = ("NONE", "TEXT_PREFIX", "DEGRADED", "EXACT")
"""From the least to the most."""


class Exactness(msgspec.Struct, frozen=True):
    """EXACT: every block of a prompt; TEXT_PREFIX: blocks before the first image; NONE: nothing.

    DEGRADED: reported blocks are identified exactly, but reports do not cover all that the worker holds, or all that
    decides what it can reuse. *reason* says why the level is not EXACT.
    """

    level: Level
    reason: str = ""


EXACT, NOTHING = Exactness("EXACT"), Exactness("NONE")
