"""How long steps and encodings take, by backend, without and with graphs: medians."""

import gc
import statistics
import time
from array import array
from collections.abc import Callable, Iterator

import msgspec
import torch

from benchmarks.gpu.checks import encoder_refusal, failure, graphs_refusal
from benchmarks.gpu.plan import NOT_RUN, Row
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.subject import GREEDY, Rows, Subject
from saccade.engine.core.step import Chunk, RowCounts
from saccade.engine.executor.execution import decoder_workload, tower_workload
from saccade.nn.backends import load_backend, load_vision_backend
from saccade.nn.context import AttentionBackend

WARM = 3
SAMPLING = msgspec.structs.replace(
    GREEDY, temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1
)


def decodes(subject: Subject, scale: Scale, cases: tuple[tuple[int, int], ...]) -> Iterator[Row]:
    """Time a whole step, drawing included, for *cases* of rows and tokens after which they decode."""
    for count, context in cases:
        for name in scale.decoders:
            for with_graphs in (False, True):
                label = f"decode step, {count} rows after {context} tokens, {name}"
                yield from _measured(
                    label + ", CUDA graphs" * with_graphs, scale, _decode(subject, name, count, context, with_graphs)
                )


Make = Callable[[], Callable[[], object] | str]
"""Returns the call to time, or why there is none."""


def _decode(subject: Subject, name: str, count: int, context: int, with_graphs: bool) -> Make:
    def make() -> Callable[[], object] | str:
        rows = _rows(subject, name, count, context, with_graphs)
        if isinstance(rows, str):
            return rows
        chunks = rows.decodes(context)
        return lambda: rows.step(chunks)

    return make


def _rows(subject: Subject, name: str, count: int, context: int, with_graphs: bool) -> Rows | str:
    """Return rows whose caches hold random prompts, or why there are no graphs."""
    if with_graphs and (reason := graphs_refusal(subject, name)) is not None:
        return reason
    rows = subject.rows(_backend(subject, name), count, context + 1)
    rows.fill()
    if with_graphs:
        rows.use_graphs()
    return rows


def prompts(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Compute prompts of many lengths, one after the other, twice: what a library makes for each new length shows."""
    for name in scale.decoders:
        label = f"{len(scale.prompts)} prompts of {scale.prompts[0]} to {scale.prompts[-1]} tokens, {name}"
        try:
            rows = subject.rows(_backend(subject, name), 1, max(scale.prompts) + 1)
            prompt_seconds(rows, scale.prompts[0] + 1)  # what is compiled at the first call
            first, again = ([prompt_seconds(rows, length) for length in scale.prompts] for _ in range(2))
        except Exception as error:
            yield failure(label, error)
            continue
        for words, times in (("each for the first time", first), ("again", again)):
            yield Row(
                f"{label}, {words}", _ms(statistics.median(times)), f"sum {_ms(sum(times))}, longest {_ms(max(times))}"
            )
        weights = sum(
            parameter.numel() for key, parameter in subject.model.module.named_parameters() if ".layers." in key
        )
        rate = 2 * weights * scale.prompts[-1] / again[-1] / 1e12
        yield Row(f"prompt of {scale.prompts[-1]} tokens, {name}", _ms(again[-1]), f"{rate:.0f} TFLOP/s in matrices")


def prompt_seconds(rows: Rows, length: int) -> float:
    """Return the seconds of a step that computes a prompt and draws."""
    return seconds_of(lambda: rows.step((Chunk(0, 0, length, (7,) * length, draws=True),)))


def encodings(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Time the encoding of one image, without and with graphs."""
    patches = subject.model.network.spec.encode_cost(subject.images[0].grid)
    for name in scale.towers:
        for with_graphs in (False, True):
            label = f"encoding an image of {patches} patches, {name}"
            yield from _measured(label + ", CUDA graphs" * with_graphs, scale, _encode(subject, name, with_graphs))


def _encode(subject: Subject, name: str, with_graphs: bool) -> Make:
    def make() -> Callable[[], object] | str:
        if with_graphs and (reason := encoder_refusal(subject, name)) is not None:
            return reason
        backend = load_vision_backend(name, tower_workload(subject.model))
        encoder = subject.encoder(backend, with_graphs=with_graphs)
        return lambda: encoder.encode(subject.images[:1])

    return make


def penalties(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Time steps whose rows have penalties for some number of token ids, which came with their first draw."""
    for seen in scale.seen:
        ids, counts = array("q", range(seen)).tobytes(), array("q", [1] * seen).tobytes()

        def make(ids: bytes = ids, counts: bytes = counts) -> Callable[[], object]:
            rows = subject.rows(subject.execution.backend, scale.most_rows, scale.context + 1, SAMPLING)
            chunks = rows.decodes(scale.context)
            rows.step(chunks, uniforms=True, counts=tuple(RowCounts(row, ids, counts) for row in range(rows.num_rows)))
            return lambda: rows.step(chunks, uniforms=True)

        yield from _measured(f"decode step, {scale.most_rows} rows, penalties for {seen} token ids each", scale, make)


def _backend(subject: Subject, name: str) -> AttentionBackend:
    return load_backend(name, decoder_workload(subject.config, subject.model))


def _measured(name: str, scale: Scale, make: Make) -> Iterator[Row]:
    gc.collect()  # two sets of caches would not fit
    try:
        call = make()
        if isinstance(call, str):
            yield Row(name, NOT_RUN, call)
            return
        for _ in range(min(WARM, scale.repeats)):
            call()
        yield Row(name, _ms(statistics.median(seconds_of(call) for _ in range(scale.repeats))))
    except Exception as error:
        yield failure(name, error)


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes, the device's work included."""
    _wait()
    began = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - began


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
