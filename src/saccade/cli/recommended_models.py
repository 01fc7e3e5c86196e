"""Recommends releases to start with, by a machine's memory and processor, and by what the releases are good at."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from saccade import models
from saccade.config import GIB
from saccade.models.family import Purpose, Release

CACHE_BYTES = 3 * GIB
"""Beyond the weights: at most 1 GiB each for the KV cache and encoded images, and the processes."""

MAX_BILLIONS_ON_CPU = 2.5
"""With more parameters an image takes minutes on a few cores (docs/start.md)."""

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
PROCESSOR = Path("/proc/cpuinfo")


class Machine(NamedTuple):
    """What the choice depends on: the memory for a model, whether it is a GPU's, and the bytes per parameter."""

    memory_bytes: int
    has_gpu: bool
    parameter_bytes: int

    def weight_bytes(self, release: Release) -> float:
        return release.billions * 1e9 * self.parameter_bytes

    def fits(self, release: Release) -> bool:
        """Whether *release* has room here, and answers within a minute or so."""
        is_fast = self.has_gpu or release.billions <= MAX_BILLIONS_ON_CPU
        return is_fast and self.weight_bytes(release) + CACHE_BYTES <= self.memory_bytes


def multiplies_bfloat16(processor: Path = PROCESSOR) -> bool:
    """Return whether the processor has instructions for bfloat16, without torch."""
    try:
        return not BFLOAT16_FLAGS.isdisjoint(processor.read_text().split())
    except OSError:
        return False


def recommend(machine: Machine, purpose: Purpose | None = None) -> Iterator[tuple[Purpose, Release]]:
    """Yield the largest release that fits *machine*, for each purpose or for one."""
    releases = [release for family in models.families().values() for release in family.releases]
    for one in get_args(Purpose):
        fitting = [release for release in releases if one in release.purposes and machine.fits(release)]
        if fitting and purpose in (None, one):
            yield one, max(fitting, key=lambda release: release.billions)
