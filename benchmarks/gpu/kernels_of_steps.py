"""Where the time of a step goes: the clock's, the host's launch, the device's by kernel; and whether a launch waits."""

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.checks import failure, graphs_refusal, line
from benchmarks.gpu.device_time import kernel_times
from benchmarks.gpu.plan import FAILED, NOT_RUN, PASSED, Row
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.subject import Rows, Subject
from benchmarks.gpu.timings import seconds_of
from saccade.engine.core.step import Chunk
from saccade.engine.executor.execution import decoder_workload
from saccade.nn.backends import PLAIN, load_backend

NUM_KERNELS = 12
MIB = 1 << 20


def kernels_of_steps(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Look at decodes with and without graphs, a prompt, and an image."""
    prompt = scale.prompt
    workload = decoder_workload(subject.config, subject.model)
    for name in (one for one in scale.decoders if one != PLAIN):
        for count, with_graphs in ((1, True), (1, False), (scale.most_rows, True)):
            label = f"{count} rows after {prompt} tokens, {name}" + ", CUDA graphs" * with_graphs
            if with_graphs and (reason := graphs_refusal(subject, name)) is not None:
                yield Row(label, NOT_RUN, reason)
                continue
            try:
                rows = subject.rows(load_backend(name, workload), count, prompt + 1)
                rows.fill()
                before = _reserved()
                if with_graphs:
                    rows.use_graphs()
                yield from _step(label, rows, rows.decodes(prompt), scale.repeats)
                if with_graphs:
                    yield Row(f"{label}: memory of graphs and wrappers", f"{(_reserved() - before) / MIB:.0f} MiB")
            except Exception as error:
                yield failure(label, error)
        label = f"a prompt of {prompt} tokens, {name}"
        try:
            rows = subject.rows(load_backend(name, workload), 1, prompt + 1)
            yield from _step(label, rows, (Chunk(0, 0, prompt, (7,) * prompt, draws=True),), scale.repeats)
        except Exception as error:
            yield failure(label, error)
    encoder = subject.encoder(subject.execution.vision_backend, with_graphs=False)
    label = f"an image of {scale.photo} patches, {encoder.backend.name}"
    yield from _call(label, lambda: encoder.encode(subject.images[:1]), scale.repeats, "")


def _step(label: str, rows: Rows, chunks: tuple[Chunk, ...], repeats: int) -> Iterator[Row]:
    """Yield the times of a step, its kernels, and whether its launch waits for the device."""
    rows.step(chunks)
    launched = []
    for _ in range(repeats):
        began = time.perf_counter()
        rows.launch(chunks)
        launched.append(time.perf_counter() - began)
        rows.executor.collect_output()
    yield from _call(label, lambda: rows.step(chunks), repeats, f"launched in {min(launched) * 1000:.2f} ms; ")
    yield _launch_waits(label, rows, chunks)


def _call(label: str, call: Callable[[], object], repeats: int, detail: str) -> Iterator[Row]:
    times = sorted(seconds_of(call) for _ in range(repeats + 2))[:repeats]
    kernels = kernel_times(call)
    total, count = sum(kernel.seconds for kernel in kernels), sum(kernel.count for kernel in kernels)
    yield Row(
        label,
        f"{times[len(times) // 2] * 1000:.2f} ms",
        f"{detail}{count} kernels, {total * 1000:.2f} ms of the device",
    )
    for kernel in kernels[:NUM_KERNELS]:
        yield Row(f"{label}: {kernel.name}", f"{kernel.seconds * 1e6:.0f} us", f"{kernel.count} times")


def _launch_waits(label: str, rows: Rows, chunks: tuple[Chunk, ...]) -> Row:
    """Have torch raise where the host waits for the device while a step is launched."""
    label = f"{label}: the launch does not wait"
    if rows.executor.runner.network.device.type != "cuda":
        return Row(label, NOT_RUN, "this needs a GPU")
    try:
        torch.cuda.set_sync_debug_mode("error")
        rows.launch(chunks)
    except Exception as error:
        return Row(label, FAILED, line(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows.executor.collect_output()
    return Row(label, PASSED)


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
