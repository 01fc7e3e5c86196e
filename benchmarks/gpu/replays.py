"""Graphs of decodes over rows and lengths that change from step to step, against eager steps in equal caches."""

from collections.abc import Iterator

import torch

from benchmarks.gpu.checks import failure, graphs_refusal
from benchmarks.gpu.plan import FAILED, NOT_RUN, PASSED, Row
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.subject import Rows, Subject
from saccade.engine.core.step import Chunk, StepInput
from saccade.engine.executor.execution import decoder_workload
from saccade.nn.backends import PLAIN, load_backend
from saccade.nn.context import KvCache

NUM_STEPS = 12
LARGEST_DIFFERENCE = 2e-2
"""||graph - eager|| / ||eager||: a graph has padding rows, so its products may add up in another order."""


def replays(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Compare the hidden states of steps whose rows and lengths no graph was captured with."""
    num_rows, num_tokens = scale.most_rows, scale.deep
    for name in scale.decoders:
        label = f"{NUM_STEPS} steps of up to {num_rows} rows and {num_tokens} tokens, {name}"
        if name == PLAIN:
            continue
        if (reason := graphs_refusal(subject, name)) is not None:
            yield Row(label, NOT_RUN, reason)
            continue
        try:
            workload = decoder_workload(subject.config, subject.model)
            eager, replayed = (subject.rows(load_backend(name, workload), num_rows, num_tokens) for _ in range(2))
            replayed.use_graphs()
            _fill_equally(eager, replayed)
            differences = list(_differences(eager, replayed, num_rows, num_tokens))
        except Exception as error:
            yield failure(label, error)
            continue
        result = PASSED if max(differences) <= LARGEST_DIFFERENCE else FAILED
        yield Row(label, result, f"graphs differ from eager steps by {max(differences):.1e}")


def _fill_equally(eager: Rows, replayed: Rows) -> None:
    """Fill the caches of both with the same keys and values; those of graphs have a padding block more."""
    for source, target in zip(_caches(eager), _caches(replayed), strict=True):
        for own, other in ((source.keys, target.keys), (source.values, target.values)):
            own.normal_()
            count = min(len(own), len(other))
            other[:count].copy_(own[:count])


def _caches(rows: Rows) -> list[KvCache]:
    return [layer for layer in rows.executor.runner.caches.layers if isinstance(layer, KvCache)]


def _differences(eager: Rows, replayed: Rows, num_rows: int, num_tokens: int) -> Iterator[float]:
    draw = torch.Generator().manual_seed(2)
    for number in range(NUM_STEPS):
        count = int(torch.randint(1, num_rows + 1, (1,), generator=draw))
        chosen = sorted(torch.randperm(num_rows, generator=draw)[:count].tolist())
        lengths = torch.randint(1, num_tokens - 1, (count,), generator=draw).tolist()
        chunks = tuple(
            Chunk(row, length, 1, (7 + row,), draws=True) for row, length in zip(chosen, lengths, strict=True)
        )
        step = StepInput(10 + number, chunks=chunks)
        expected, actual = (one.executor.runner.forward(step).hidden for one in (eager, replayed))
        if expected is None or actual is None:
            raise RuntimeError("a step with chunks gave no hidden states")
        yield float((actual.float() - expected.float()).norm() / expected.float().norm())
