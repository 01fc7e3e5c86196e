"""Networks never make the host wait for a GPU.

There is none here. So what would read a value back from the device, or copy a number of the host to it, is found by
its name while the network of each family computes steps on a CPU. CUDA captures none of these calls either.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS
from torch.overrides import TorchFunctionMode

from saccade.engine import warmup
from saccade.engine.loop import Engine

EVERYDAY = ("qwen3_vl", "qwen3_5", "gemma4_e2b")
CASES = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.conformance) for name in NETWORKS]

READS = {
    *("tolist", "item", "numpy", "cpu", "nonzero", "unique", "unique_consecutive", "masked_select"),
    *("__bool__", "__int__", "__float__", "__index__"),
}
MADE_ON_THE_HOST = {"tensor", "as_tensor", "from_numpy", "scalar_tensor"}


def wait_of(name: str, args: tuple[Any, ...]) -> str | None:
    """Return why a call of torch makes the host wait; None if it does not."""
    if name in READS:
        return f"{name} reads values back"
    if name in MADE_ON_THE_HOST:
        return f"torch.{name} copies numbers of the host"
    if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return "repeat_interleave reads its counts back"
    if name == "__getitem__":
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        for place in places:
            if isinstance(place, list):
                return "an index by a list copies it"
            if isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8):
                return "an index by a mask counts its values"
    return None


class Waits(TorchFunctionMode):
    """Collects the calls that make the host wait, while *is_watching*."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.is_watching = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_watching and (wait := wait_of(getattr(func, "__name__", ""), args)) is not None:
            frames = [frame for frame in traceback.extract_stack() if "/src/saccade/" in frame.filename]
            place = frames[-1]
            # A GPU has experts in bfloat16 by one product, and a product of the library for those that are quantised.
            if all(frame.name != "experts" for frame in frames):
                self.found.add(f"{wait}: {place.filename.rpartition('/src/')[2]}:{place.lineno}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(waits: Waits, owner: Any, name: str) -> Iterator[None]:
    """Watch calls of the method *name*."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        waits.is_watching = True
        try:
            return method(*args, **kwargs)
        finally:
            waits.is_watching = False

    setattr(owner, name, watched)
    try:
        yield
    finally:
        delattr(owner, name) if name in vars(owner) else setattr(owner, name, method)


def waits_of(engine: Engine) -> set[str]:
    """Return the calls of the network that make the host wait, over prompts, decodes and an image."""
    waits, network = Waits(), engine.executor.runner.network
    with (
        watching(waits, network, "forward"),
        watching(waits, network, "encode"),
        watching(waits, network, "logits"),
        waits,
    ):
        warmup.run_warmup(engine, 33, None, 3)
    return waits.found


@pytest.mark.parametrize("name", CASES)
def test_a_network_does_not_make_the_host_wait(name: str, network_folder: Callable[[str], Path]) -> None:
    assert waits_of(engines.engine(network_folder(name), num_blocks=256, max_num_seqs=8)) == set()


def test_a_wait_is_found(tiny_qwen3_vl: Path) -> None:
    engine = engines.engine(tiny_qwen3_vl)
    network = engine.executor.runner.network
    logits = network.logits

    def waiting(hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden) * torch.tensor(2.0, device=hidden.device) * float(hidden.sum())

    network.logits = waiting
    found = {wait.partition(":")[0] for wait in waits_of(engine)}
    assert found == {"torch.tensor copies numbers of the host", "__float__ reads values back"}
