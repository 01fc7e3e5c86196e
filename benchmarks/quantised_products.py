"""Linear layers in each format on this CPU, by the number of tokens.

    OMP_NUM_THREADS=2 python -m benchmarks.quantised_products [--shape 6144 2048] [--rows 1 4 16] [--dtype float32]

Every layer is packed as an engine packs it, and has copies that do not fit into the processor's cache together. Layers
take turns in every round, so the ratios of a row hold on a busy machine when the figures do not. Prints a table of
medians in microseconds, and each one's share of the plain layer's.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.measured import commit, machine
from saccade.nn.formats.int8 import rounded_rows
from saccade.nn.formats.packed_ints import rounded_groups
from saccade.nn.formats.quantised import QuantisedWeight
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import resolve

CACHE = 200 << 20
"""Bytes of the copies of a layer, at least."""

ROUNDS = 7
GROUP_SIZE = 64
FORMATS: dict[str, tuple[Callable[[torch.Tensor], QuantisedWeight] | None, float]] = {
    "plain": (None, 2),
    "int8": (rounded_rows, 1),
    "int4": (lambda weight: rounded_groups(weight, GROUP_SIZE), 0.5),
}
"""How a weight is rounded, and the bytes of a value at least."""


def layers(name: str, weight_OI: torch.Tensor) -> Iterator[Linear]:
    """Yield copies of a layer in the format *name*, again and again."""
    rounded, bytes_of_value = FORMATS[name]
    copies = []
    for _ in range(max(2, int(CACHE // (weight_OI.numel() * bytes_of_value)))):
        layer = Linear.of(weight_OI.clone())
        if rounded is not None:
            layer.round_weight(rounded)
        use_operations(layer, resolve("cpu", weight_OI.dtype))
        copies.append(layer)
    return itertools.cycle(copies)


def microseconds(layer: Linear, x_NI: torch.Tensor) -> float:
    """Return how long one product takes."""
    began = time.perf_counter()
    layer(x_NI)
    return 1e6 * (time.perf_counter() - began)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=(6144, 2048))
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 4, 16, 64, 256))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    weight_OI = (torch.randn(*arguments.shape) / arguments.shape[1] ** 0.5).to(dtype)
    copies = {name: layers(name, weight_OI) for name in FORMATS}
    print(f"{machine()}, {torch.get_num_threads()} threads\nCommit: {commit()}\n\n| rows | {' | '.join(FORMATS)} |")
    print("|---" * (1 + len(FORMATS)) + "|")
    for rows in arguments.rows:
        x_NI = torch.randn(rows, arguments.shape[1]).to(dtype)
        times: dict[str, list[float]] = {name: [] for name in FORMATS}
        for _ in range(ROUNDS):
            for name, some in copies.items():
                times[name].append(min(microseconds(next(some), x_NI) for _ in range(3)))
        plain = statistics.median(times["plain"])
        columns = (f"{statistics.median(own):,.0f} ({statistics.median(own) / plain:.2f}x)" for own in times.values())
        print(f"| {rows} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
