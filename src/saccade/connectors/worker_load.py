"""Decides which part of a worker's reported load a gateway keeps."""

import math

import msgspec

from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load


def plausible(load: Load) -> Load:
    """Return *load* with 0 for impossible numbers, and without counts of steps for bounds other than ours.

    A worker of another version may have other bounds. Its answers may be right all the same.
    """
    changes: dict[str, object] = {
        name: 0
        for name in load.__struct_fields__
        if isinstance(number := getattr(load, name), int | float) and not 0 <= number < math.inf
    }
    steps = load.steps_by_tokens
    if steps and (len(steps) != len(STEP_TOKEN_BOUNDS) + 1 or min(steps) < 0):
        changes["steps_by_tokens"] = ()
    return msgspec.structs.replace(load, **changes) if changes else load
