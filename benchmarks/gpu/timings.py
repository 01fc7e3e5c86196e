"""How long a decode step and an encoding take, by backend, without and with graphs: medians."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.gpu.checks import FAILURES
from benchmarks.gpu.subject import Subject
from saccade.engine.executor.encoder_graphs import refusal
from saccade.engine.executor.execution import decoder_workload, tower_workload
from saccade.nn.backends import BACKENDS, VISION_BACKENDS, load_backend, load_vision_backend

WARM, REPEATS = 3, 20


class Timing(NamedTuple):
    """A call and its median in milliseconds."""

    name: str
    milliseconds: float


def all_timings(subject: Subject, num_rows: tuple[int, ...]) -> Iterator[Timing]:
    """Measure what can compute the model; what cannot is left out, and the checks say why."""
    device_type = subject.model.network.device.type
    for name in (name for name, entry in BACKENDS.items() if entry.device_type in (None, device_type)):
        for count in num_rows:
            for with_graphs in (False, True):
                yield from _measured(
                    f"decode step of {count} rows, {name}", _decode(subject, name, count, with_graphs), with_graphs
                )
    for name in (name for name, entry in VISION_BACKENDS.items() if entry.device_type in (None, device_type)):
        for count in sorted({1, len(subject.images)}):
            for with_graphs in (False, True):
                yield from _measured(
                    f"encoding {count} images, {name}", _encode(subject, name, count, with_graphs), with_graphs
                )


Make = Callable[[], Callable[[], object] | None]


def _decode(subject: Subject, name: str, num_rows: int, with_graphs: bool) -> Make:
    def make() -> Callable[[], object] | None:
        backend = load_backend(name, decoder_workload(subject.config, subject.model))
        if with_graphs and not backend.captures_decodes:
            return None
        return subject.decoding(backend, num_rows, with_graphs=with_graphs)

    return make


def _encode(subject: Subject, name: str, count: int, with_graphs: bool) -> Make:
    def make() -> Callable[[], object] | None:
        backend = load_vision_backend(name, tower_workload(subject.model))
        if with_graphs and refusal(subject.model.network, backend, cuts_encoder=False) is not None:
            return None
        encoder, job = subject.encoder(backend, with_graphs=with_graphs), subject.job(count)
        return lambda: encoder.encode_together(job)

    return make


def _measured(name: str, make: Make, with_graphs: bool) -> Iterator[Timing]:
    try:
        call = make()
        if call is not None:
            yield Timing(f"{name}{', CUDA graphs' if with_graphs else ''}", 1000 * _median_seconds(call))
    except FAILURES:
        return


def _median_seconds(call: Callable[[], object]) -> float:
    for _ in range(WARM):
        call()
    seconds = []
    for _ in range(REPEATS):
        _wait()
        began = time.perf_counter()
        call()
        _wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
