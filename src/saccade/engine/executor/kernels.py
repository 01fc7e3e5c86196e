"""At startup, compile the kernels that libraries would otherwise compile at first use, stalling requests for seconds.

A packed weight knows its kernels (ops.PackedLinear.kernels). Each is compiled by one multiplication of zeros, once for
all layers of the same shape. DeepGEMM keeps compiled kernels on disk for later starts. Kernels are compiled one after
another: DeepGEMM's list of kernels has no lock, so no two threads may call it. Each rank begins at a different kernel,
and finds the kernels of the other ranks on disk.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import nn

from saccade.engine.executor.weight_filler import Progress
from saccade.errors import StartupError
from saccade.nn.backends.compilers import objects
from saccade.nn.experts import Experts
from saccade.nn.layers import Linear
from saccade.nn.libraries import Unavailable, attempt
from saccade.nn.parallel import Ranks

STAGE = "compiling kernels of products, which later starts find"
SECONDS = 10.0


@contextmanager
def reported(progress: Progress, stage: str, seconds: float = SECONDS) -> Iterator[None]:
    """Report *stage*, and how many objects of a module a library has compiled, every *seconds* within the block.

    The front kills an engine that stays silent too long at its start. Nothing else may call *progress* in the block.
    """
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(seconds):
            progress(stage, *objects())

    progress(stage, 0, 0)
    thread = threading.Thread(target=report, name="reports of compilers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def compile_kernels(module: nn.Module, most_tokens: int, ranks: Ranks, progress: Progress) -> None:
    """Compile all kernels that layers of *module* need for 1 to *most_tokens* tokens. Raises StartupError."""
    calls: dict[Hashable, tuple[Linear | Experts, int]] = {}
    for layer in module.modules():
        if isinstance(layer, Linear | Experts) and layer.packed is not None:
            for kernel, num_tokens in layer.packed.kernels(most_tokens).items():
                calls.setdefault(kernel, (layer, num_tokens))
    first = len(calls) * ranks.rank // ranks.size
    in_order = [*calls.values()]
    for number, (layer, num_tokens) in enumerate(in_order[first:] + in_order[:first]):
        progress(STAGE, number, len(calls))
        try:
            with attempt():
                layer.compile_kernel(num_tokens)
        except Unavailable as error:
            raise StartupError(f"A product of the model with {num_tokens} rows failed: {error.reason}.") from error
