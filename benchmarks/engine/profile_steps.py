"""Where the time of a step goes on this CPU, by kind of work and number format, and how near it is to the limit.

    python -m benchmarks.engine.shape_2b DIR
    python -m benchmarks.engine.profile_steps DIR [--formats bfloat16 int8 int4] [--out PAGE]

DIR holds a Qwen3-VL. One engine at a time in this process, without gateway and wire. Each row is one step: tokens of 1,
4 and 16 sequences, a prompt of 1,000 tokens, or an image in the vision encoder alone. Its time and its threads' are
medians without the profiler. The time of torch's operations is measured with it, and the rest is Python's. The limit
is the longer of two times: the bytes of the weights over the bandwidth, measured beside each row, and the operations of
the products and of attention over the peak. The peak is that of a large product in the same format; int4 has
bfloat16's, and attention that is products of float32 has float32's.
Writes a page (default benchmarks/results/profile-steps.md).
"""

import argparse
import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measured import ROOT, commit, machine
from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.core.step import EncoderInput
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.model_runner import ModelRunner
from saccade.engine.executor.step_bytes import packed_bytes
from saccade.engine.loop import Engine
from saccade.nn.formats.int8 import rounded_rows
from saccade.nn.layers import Linear, use_operations
from saccade.nn.ops import Activation, PackedLinear, resolve
from saccade.protocol.request import EngineRequest, SamplingParams

PAGE = ROOT / "benchmarks/results/profile-steps.md"
FORMATS = {"bfloat16": None, "int8": "int8", "int4": "int4"}
SEQUENCES = (1, 4, 16)
PROMPT_TOKENS = 1000
IMAGES = ((448, 448), (1280, 960))
PATCH, PIXEL_VALUES = 16, 768
CONTEXT, MOST_TOKENS = 30, 200
THREADS, NUM_LARGEST = 2, 8
ATTENTION = "scaled_dot_product_flash"
Step = Callable[[], object]
LIMITS = ("bytes / bandwidth", "operations / peak", "step / limit")
KINDS = (
    ("products", r"mm|linear|conv"),
    ("attention", r"scaled_dot_product|flash"),
    ("norms", r"norm"),
    ("sampling", r"argmax|topk|sort|softmax|cumsum|multinomial"),
    ("copies", r"copy|clone|cat|stack|index|gather|scatter|fill|zero|empty|ones|resize|contiguous|roll|arange|repeat"),
    (
        "views",
        r"view|reshape|strided|transpose|permute|select|slice|squeeze|expand|split|chunk|unbind|detach|alias|narrow"
        r"|flatten|::t$|movedim|lift|item|scalar|::to$|resolve|result_type",
    ),
    ("element-wise", r""),
)
"""The first pattern that an operation's name contains decides its kind."""

TEMPLATE = """# Where the time of a step goes on a CPU

{machine}

    python -m benchmarks.engine.shape_2b DIR
    {command}

Milliseconds of one step of the engine, or of one image in the vision encoder, without gateway and wire. *ms a layer* is
the step divided by its layers. From *products* to *element-wise* are torch's operations by kind, with torch's profiler,
which makes short ones seem longer. *Python* is the rest of the step without the profiler. *idle* is the part of the
threads' time in which they neither computed nor spun. The last three columns are the limits: the time to read the
weights once at the bandwidth that was measured beside the row, the time for the operations of products and attention
at the rate of a large product, and how many times the longer of these the step takes. Attention of prompts and images
is products of float32 on this processor ([why](../../docs/decisions/008-kernels-on-cpu.md#attention-by-onednn)).

{table}

The operations that take longest, each with its milliseconds and its calls in a step:

{largest}
"""


@dataclass(frozen=True)
class Peaks:
    """Operations a second in large products: of the engine's format, of bfloat16, and of float32."""

    of_format: float
    of_bfloat16: float
    of_float32: float


@dataclass
class Work:
    """What the linear layers of a step read and compute, and the operations of attention by dtype."""

    num_bytes: int = 0
    operations: int = 0
    of_attention: int = 0
    of_float32_attention: int = 0

    def seconds(self, peaks: Peaks) -> float:
        """Return how long the operations take at *peaks*."""
        of_attention = self.of_attention / peaks.of_bfloat16 + self.of_float32_attention / peaks.of_float32
        return self.operations / peaks.of_format + of_attention


class AttentionCounter(TorchDispatchMode):
    """Counts the operations of attention in *work*: PyTorch's function, or products of float32 by oneDNN."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implements TorchDispatchMode."""
        if ATTENTION in func.name():
            queries, keys = args[:2]
            self.work.of_attention += 4 * queries.numel() * keys.shape[-2]
        elif func is torch.ops.mkldnn._linear_pointwise.default and args[0].dtype == torch.float32:
            self.work.of_float32_attention += 2 * args[0].numel() * args[1].shape[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted(PackedLinear):
    """A linear layer that adds to *work* what each product reads and computes."""

    layer: PackedLinear
    sides: tuple[int, int]
    num_bytes: int
    work: Work

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        self._count(x_NI)
        return self.layer.apply(x_NI, activation)

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        self._count(x_NI)
        return self.layer.add_to(residual_NO, x_NI)

    def _count(self, x_NI: torch.Tensor) -> None:
        self.work.num_bytes += self.num_bytes
        self.work.operations += 2 * len(x_NI) * self.sides[0] * self.sides[1]


class Figures(NamedTuple):
    """A step's seconds, the part of the threads' time that they are busy, and the step's limits in seconds.

    *operations* has the seconds and the number of calls of each of torch's operations.
    """

    seconds: float
    busy: float
    operations: dict[str, tuple[float, float]]
    of_bytes: float
    of_operations: float

    def cells(self, num_layers: int) -> Iterator[str]:
        """Yield the cells of a row of the table, in milliseconds; the step passes *num_layers*."""
        kinds = dict.fromkeys((name for name, _ in KINDS), 0.0)
        for name, (seconds, _) in self.operations.items():
            kinds[kind_of(name)] += seconds
        yield f"{1e3 * self.seconds:.1f}"
        yield f"{1e3 * self.seconds / num_layers:.2f}"
        yield from (
            f"{1e3 * seconds:.1f}" for seconds in (*kinds.values(), max(0.0, self.seconds - sum(kinds.values())))
        )
        yield from (f"{100 * (1 - self.busy):.0f} %", f"{1e3 * self.of_bytes:.1f}", f"{1e3 * self.of_operations:.1f}")
        yield f"**{self.seconds / max(self.of_bytes, self.of_operations):.2f}**"

    def largest(self) -> str:
        """Return the operations that take longest, each with its milliseconds and calls."""
        largest = sorted(self.operations.items(), key=lambda one: -one[1][0])[:NUM_LARGEST]
        return ", ".join(f"{name.split('::')[1]} {1e3 * seconds:.1f} ({calls:g})" for name, (seconds, calls) in largest)


def best_rate(amount: float, compute: Callable[[], object], repeats: int = 5) -> float:
    """Return *amount* a second by the fastest of some calls of *compute*, after one more."""
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        compute()
        times.append(time.perf_counter() - began)
    return amount / min(times[1:])


def bandwidth() -> float:
    """Return the bytes that all threads together read a second from more memory than fits into a cache."""
    values = torch.ones(1 << 28)
    return best_rate(values.nbytes, values.sum)


def peak(dtype: torch.dtype, rounds: bool = False) -> float:
    """Return the operations a second of a large product in *dtype*, or in int8 if the layer *rounds*."""
    layer = Linear.of(torch.randn(4096, 4096).to(dtype))
    if rounds:
        layer.round_weight(rounded_rows)
    use_operations(layer, resolve("cpu", dtype))
    x_NI = torch.randn(2048, 4096).to(dtype)
    return best_rate(2 * len(x_NI) * 4096 * 4096, lambda: layer(x_NI))


@contextmanager
def counted(network: torch.nn.Module) -> Iterator[Work]:
    """Count in the value what the linear layers of *network* read and compute while the block runs."""
    work = Work()
    layers = [layer for layer in network.modules() if isinstance(layer, Linear)]
    packed = [layer.packed for layer in layers]
    for layer in layers:
        if layer.packed is not None:
            sides = layer.weight.shape[1], sum(layer.partitions)
            layer.packed = Counted(layer.packed, sides, packed_bytes(layer.packed), work)
    try:
        with AttentionCounter(work):
            yield work
    finally:
        for layer, before in zip(layers, packed, strict=True):
            layer.packed = before


def text(number: int, num_tokens: int, num_answered: int) -> EngineRequest:
    """Return a request that shares no prompt with another *number*."""
    token_ids = [(number * 7 + place) % 200 + 1 for place in range(num_tokens)]
    sampling = SamplingParams(max_tokens=num_answered, min_tokens=num_answered, temperature=0)
    return EngineRequest(request_id=str(number), token_ids=token_ids, sampling=sampling)


def decode_steps(engine: Engine, num_sequences: int) -> Iterator[Step]:
    """Yield steps in which *num_sequences* decode."""
    for number in range(num_sequences):
        engine.requests.submit(0, text(number, CONTEXT, MOST_TOKENS))
    try:
        while sum(one.is_decoding for one in engine.scheduler.running) < num_sequences:
            engine.step()
        while True:
            yield engine.step
    finally:
        for number in range(num_sequences):
            engine.requests.abort(0, str(number))
        engine.step()


def prompt_steps(engine: Engine) -> Iterator[Step]:
    """Yield steps that compute a prompt and draw its first token."""
    for number in itertools.count():
        engine.requests.submit(0, text(number, PROMPT_TOKENS, 1))
        yield engine.step


def image_steps(subject: ModelRunner, size: tuple[int, int]) -> Iterator[Step]:
    """Yield calls that encode an image of *size*, (width, height)."""
    grid = (1, size[1] // PATCH, size[0] // PATCH)
    num_patches = grid[1] * grid[2]
    pixels = np.random.default_rng(0).integers(0, 256, num_patches * PIXEL_VALUES, dtype=np.uint8).tobytes()
    subject.threads.use(num_patches, 0)
    while True:
        yield partial(subject.encoder.encode, [EncoderInput(0, "image", grid, None, pixels)])


def kind_of(operation: str) -> str:
    """Return the kind of one of torch's operations."""
    return next(name for name, pattern in KINDS if re.search(pattern, operation))


def profiled(steps: Iterable[Step]) -> dict[str, tuple[float, float]]:
    """Return the seconds and calls of each operation in one of *steps*, on average."""
    num_steps = 0
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for step in steps:
            step()
            num_steps += 1
    totals: dict[str, tuple[float, float]] = {}
    for event in found.events() or ():
        if "::" in event.name:
            seconds, calls = totals.get(event.name, (0.0, 0))
            totals[event.name] = seconds + event.self_cpu_time_total / 1e6, calls + 1
    return {name: (seconds / num_steps, calls / num_steps) for name, (seconds, calls) in totals.items()}


def measure(subject: ModelRunner, steps: Iterator[Step], num_timed: int, peaks: Peaks) -> Figures:
    """Return the figures of *steps*: two warm up, *num_timed* are timed, and some more are counted and profiled."""
    for step in itertools.islice(steps, 2):
        step()
    rates, walls, threads = [bandwidth()], [], []
    for step in itertools.islice(steps, num_timed):
        began, busy = time.perf_counter(), time.process_time()
        step()
        walls.append(time.perf_counter() - began)
        threads.append((time.process_time() - busy) / walls[-1])
    rates.append(bandwidth())
    with counted(subject.network) as work:
        next(steps)()
    return Figures(
        seconds=statistics.median(walls),
        busy=statistics.median(threads) / THREADS,
        operations=profiled(itertools.islice(steps, max(2, num_timed // 4))),
        of_bytes=work.num_bytes / statistics.mean(rates),
        of_operations=work.seconds(peaks),
    )


def rows(folder: str, number_format: str) -> Iterator[tuple[str, str]]:
    """Measure an engine in *number_format*. Yield the rows of the table, each with a line about its operations."""
    config = EngineConfig(
        folder, "benchmark", device="cpu", dtype="bfloat16", quantization=FORMATS[number_format], max_num_seqs=16,
        threads=THREADS, enable_prefix_caching=False, kv_cache_bytes=1 << 29, max_inter_token_latency=0,
    )  # fmt: skip
    engine = startup.start(config, lambda *_: None)
    if not isinstance(engine.executor, LocalExecutor):
        raise TypeError("The steps of several processes cannot be profiled.")
    subject = engine.executor.runner
    torch.set_num_threads(THREADS)
    plain_peak = peak(torch.bfloat16)
    of_format = peak(torch.bfloat16, rounds=True) if number_format == "int8" else plain_peak
    peaks = Peaks(of_format, plain_peak, peak(torch.float32))
    of_text = (*((f"text, {count} rows", decode_steps(engine, count), 24) for count in SEQUENCES),)
    of_prompt = (f"prompt of {PROMPT_TOKENS:,}", prompt_steps(engine), 3)
    of_images = ((f"image of {size[0]}x{size[1]}", image_steps(subject, size), 3) for size in IMAGES)
    spec = subject.network.spec
    for number, (name, steps, num_timed) in enumerate((*of_text, of_prompt, *of_images)):
        num_layers = spec.num_encoder_layers if number > len(of_text) else len(spec.kv_specs)
        with closing(steps):
            found = measure(subject, steps, num_timed, peaks)
        row = f"| {number_format} | {name} | {' | '.join(found.cells(num_layers))} |"
        yield row, f"- {number_format}, {name}: {found.largest()}"
    engine.close()


def main() -> None:
    """Profile the model that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    lines, largest = [], []
    for number_format in arguments.formats:
        for row, operations in rows(arguments.model, number_format):
            print(row, operations, sep="\n", flush=True)
            lines.append(row)
            largest.append(operations)
        gc.collect()
    columns = ("weights", "step", "ms", "ms a layer", *(name for name, _ in KINDS), "Python", "idle", *LIMITS)
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    machine_line = f"{machine()}, {THREADS} threads; torch {torch.__version__}; commit {commit()}"
    command = f"python -m benchmarks.engine.profile_steps DIR --formats {' '.join(arguments.formats)}"
    table = "\n".join([head, *lines])
    arguments.out.write_text(
        TEMPLATE.format(machine=machine_line, command=command, table=table, largest="\n".join(largest))
    )


if __name__ == "__main__":
    main()
