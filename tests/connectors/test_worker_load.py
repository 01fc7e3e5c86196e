"""What a gateway keeps of a worker's report of its load."""

import math

import msgspec
from tables import table

from saccade.connectors.worker_load import NUMBERS, plausible
from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load

SOUND = Load(num_running=3, encode_seconds_total=1.5, steps_by_tokens=(1,) * (len(STEP_TOKEN_BOUNDS) + 1))


def test_sound_load_stays_as_it_is() -> None:
    assert plausible(SOUND) is SOUND
    assert "draining" not in NUMBERS


@table("number", [-1, math.nan, math.inf, -math.inf])
@table("name", NUMBERS)
def test_impossible_number_counts_as_none(name: str, number: float) -> None:
    load = msgspec.structs.replace(SOUND, **{name: number})
    assert plausible(load) == msgspec.structs.replace(SOUND, **{name: 0})


@table("steps", [(1,), (-1,) * (len(STEP_TOKEN_BOUNDS) + 1)])
def test_counts_of_steps_by_other_bounds_are_dropped(steps: tuple[int, ...]) -> None:
    load = msgspec.structs.replace(SOUND, steps_by_tokens=steps)
    assert plausible(load) == msgspec.structs.replace(SOUND, steps_by_tokens=())
