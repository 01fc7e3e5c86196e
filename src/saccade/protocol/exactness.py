"""How exactly a gateway can know what a worker's KV cache holds of a prompt."""

from typing import Literal

import msgspec


class Exactness(msgspec.Struct, frozen=True):
    """EXACT: every block of a prompt; TEXT_PREFIX: blocks before the first picture; NONE: nothing.

    *reason* tells why it is not EXACT.
    """

    level: Literal["EXACT", "TEXT_PREFIX", "NONE"]
    reason: str = ""


EXACT = Exactness("EXACT")
