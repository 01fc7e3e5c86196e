"""Patches are written into a slot by shape, so how they lay in memory before does not matter."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from tables import table

from saccade.transport.shared_memory import SlotPool, open_slot, read_slot

DRAW = np.random.default_rng(0)
VALUES = DRAW.integers(0, 256, (12, 48), dtype=np.uint8)
PATCHES: dict[str, npt.NDArray[np.generic]] = {
    "contiguous": VALUES,
    "turned": VALUES.T,
    "every other": VALUES[::2, ::3],
    "backwards": VALUES[::-1],
    "expanded": np.broadcast_to(VALUES[0], (7, 48)),
    "one value": np.array(7, dtype=np.uint8),
    "bits of bfloat16": DRAW.integers(0, 1 << 16, (5, 48), dtype=np.uint16),
    "float32": DRAW.random((5, 48), dtype=np.float32),
}


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(1 << 20)
    yield pool
    pool.close()


@table("name", PATCHES)
def test_patches_arrive_whatever_their_layout(pool: SlotPool, name: str) -> None:  # B2, [eng] 7
    patches = PATCHES[name]
    slot = pool.acquire(patches.nbytes)
    assert slot is not None
    with open_slot(slot.ref) as memory:
        np.frombuffer(memory, patches.dtype).reshape(patches.shape)[...] = patches
    assert np.array_equal(np.frombuffer(read_slot(slot.ref), patches.dtype).reshape(patches.shape), patches)


def test_an_empty_slot_is_no_special_case(pool: SlotPool) -> None:  # [eng] 7
    slot = pool.acquire(0)
    assert slot is not None
    with open_slot(slot.ref):
        pass
    assert read_slot(slot.ref) == b""
