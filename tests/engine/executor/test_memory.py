"""How many blocks layers with a window have, of the memory that all layers share."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tables import table

from saccade.engine.config import EngineConfig
from saccade.engine.executor import memory
from saccade.models.spec import KvSpec, Paged
from saccade.nn.parallel import ALONE

BLOCK = 16
CPU = torch.device("cpu")


def model(kv_specs: tuple[KvSpec, ...], longest_whole: int = 0) -> Any:
    spec = SimpleNamespace(kv_specs=kv_specs, longest_whole=longest_whole)
    return SimpleNamespace(network=SimpleNamespace(spec=spec, dtype=torch.bfloat16, device=CPU), ranks=ALONE)


RELEASES = {
    "26B": model(tuple(Paged(2, 512, 512) if n % 6 == 5 else Paged(8, 256, 256, 1024) for n in range(30)), 1120),
    "E2B": model(tuple(Paged(1, 512, 512) if n % 5 == 4 else Paged(1, 256, 256, 512) for n in range(15))),
}
"""The layers of two releases of Gemma 4 with keys and values of their own."""


@table(("name", "least_gain"), [("26B", 2.9), ("E2B", 1.39)])
def test_short_sequences_lose_a_fifth_and_long_ones_win_it(name: str, least_gain: float) -> None:
    subject, budget = RELEASES[name], 8 << 30
    spec, config = subject.network.spec, EngineConfig("", "", kv_cache_bytes=budget, max_num_seqs=256)
    bytes_of = partial(memory.pool_bytes, config, subject)
    num_blocks = memory.num_blocks(config, bytes_of, 1 << 20, CPU)
    assert bytes_of(num_blocks) <= budget < bytes_of(num_blocks + 1)
    before = budget // memory.block_bytes(spec.kv_specs, BLOCK, torch.bfloat16)
    assert num_blocks > least_gain * before
    assert 0.79 * before < memory.num_window_blocks(spec, BLOCK, num_blocks) <= 0.8 * before


@table(("num_blocks", "expected"), [(6, 6), (12, 10), (25, 10), (1000, 400)])
def test_two_sequences_fit_at_least(num_blocks: int, expected: int) -> None:
    """A window of 33 tokens has two blocks before a boundary; a sequence may need three more, of a chunk and both ends."""
    spec = model((Paged(1, 8, 8), *(Paged(1, 8, 8, 33),) * 5)).network.spec
    assert memory.num_window_blocks(spec, BLOCK, num_blocks) == expected


def test_measurement_has_blocks_for_a_whole_step_in_every_layer() -> None:
    for subject in RELEASES.values():
        spec = subject.network.spec
        num_blocks = memory.least_blocks(spec, 1000)
        assert memory.num_window_blocks(spec, BLOCK, num_blocks) >= 1000
    assert memory.least_blocks(model((Paged(1, 8, 8),)).network.spec, 1000) == 1000
    assert memory.num_window_blocks(model((Paged(1, 8, 8),)).network.spec, BLOCK, 1000) == 0
