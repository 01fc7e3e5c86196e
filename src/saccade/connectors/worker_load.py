"""Decides which part of a worker's reported load a gateway keeps."""

import math
from operator import attrgetter
from typing import Final

import msgspec

from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load

NUMBERS: Final = tuple(
    field.name
    for field in msgspec.structs.fields(Load)
    if isinstance(field.default, int | float) and field.type is not bool
)
_numbers_of = attrgetter(*NUMBERS)


def plausible(load: Load) -> Load:
    """Return *load* with 0 for impossible numbers, and without counts of steps for bounds other than ours.

    A worker of another version may have other bounds. Its answers may be right all the same.
    """
    numbers, steps = _numbers_of(load), load.steps_by_tokens
    has_steps = not steps or (len(steps) == len(STEP_TOKEN_BOUNDS) + 1 and min(steps) >= 0)
    # The sum is NaN if a number is, so that the comparison fails. Few loads get further, and they come often.
    if has_steps and min(numbers) >= 0 and sum(numbers) < math.inf:
        return load
    changes: dict[str, object] = {
        name: 0 for name, number in zip(NUMBERS, numbers, strict=True) if not 0 <= number < math.inf
    }
    if not has_steps:
        changes["steps_by_tokens"] = ()
    return msgspec.structs.replace(load, **changes)
