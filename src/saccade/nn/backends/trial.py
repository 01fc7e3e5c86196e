"""Tries a backend with a few tokens, so that a failing library or compiler shows before the model runs.

A library for GPUs may raise anything at its first call: for a missing compiler, a package of another version, a GPU
without a kernel. Shapes: H = 2 query heads, one key/value head.
"""

import dataclasses
from collections.abc import Callable
from math import prod
from typing import TypeVar

import structlog
import torch

from saccade.errors import StartupError, cause
from saccade.nn.backends.workload import Workload
from saccade.nn.context import (
    AttentionBackend,
    ForwardContext,
    KvCache,
    LatentCache,
    PackedLayout,
    PagedLayout,
    VisionAttentionBackend,
)
from saccade.nn.delta_rule import Gates, RuleHeads, Trail
from saccade.nn.ops import Operations

NUM_HEADS = 2
BLOCK_SIZE = 16
LATENT, LATENT_HEADS = (512, 64), 16
"""The widths of the two parts of a latent in all releases, and heads of a rank."""

CHUNK = 70
"""Tokens of a chunk, more than a block of the delta rule."""

Backend = TypeVar("Backend", AttentionBackend, VisionAttentionBackend)

logger = structlog.get_logger(__name__)


def tried(
    load: Callable[[str, Workload], Backend],
    requested: str,
    workload: Workload,
    trial: Callable[[Backend, Workload], None],
) -> tuple[Backend, Workload]:
    """Load the backend with the name *requested*, and try it; for auto, try the next one after a failure.

    Return it, and *workload* with the failures and with whether the backend reads the cache in place. Raises
    StartupError if no backend can compute, or if a failure left the GPU unusable, so that every later trial would fail.
    """
    while True:
        backend = load(requested, workload)
        try:
            trial(backend, workload)
        except Exception as error:
            logger.warning("an attention backend failed on its trial", backend=backend.name, exc_info=True)
            if not computes(workload.device):
                raise StartupError(
                    f"The trial of the attention backend {backend.name} failed ({cause(error)}), and the GPU computes "
                    "nothing since. Start again with another backend."
                ) from error
            reason = f"its trial failed ({cause(error)})"
            workload = dataclasses.replace(workload, failed={**workload.failed, backend.name: reason})
        else:
            return backend, dataclasses.replace(workload, is_cache_read=not getattr(backend, "copies_prefixes", True))


def computes(device: torch.device) -> bool:
    """Return whether *device* still computes: after some errors a process has no working GPU."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def of_decoder(backend: AttentionBackend, workload: Workload) -> None:
    """Compute attention for a decode, a prompt and a chunk after a prefix, with every head size, and over latents."""
    device = workload.device
    queries, contexts = (1, 2, 2), (3, 2, 5)
    layout = PagedLayout(
        slot_mapping=torch.tensor([2, 16, 17, 35, 36], device=device),
        block_tables=torch.arange(3, device=device).unsqueeze(1),
        context_lengths=torch.tensor(contexts, device=device),
        query_lengths=queries,
        host_context_lengths=contexts,
        num_decodes=1,
        block_size=BLOCK_SIZE,
        rows=torch.arange(3, device=device),
    )
    positions = torch.zeros(3, sum(queries), dtype=torch.int64, device=device)
    plan = backend.plan(layout, workload.dtype)
    for sizes in sorted(workload.head_sizes):
        keys, values = (
            torch.zeros(3, BLOCK_SIZE, 1, size, dtype=workload.cache_dtype or workload.dtype, device=device)
            for size in sizes
        )
        q, k, v = (
            torch.ones(sum(queries), num_heads, size, dtype=workload.dtype, device=device)
            for num_heads, size in ((NUM_HEADS, sizes[0]), (1, sizes[0]), (1, sizes[1]))
        )
        backend.paged(q, k, v, 0, ForwardContext(positions, layout, [KvCache(keys, values)], backend, plan))
    if workload.has_latent_layers:
        width = sum(LATENT)
        latents = torch.zeros(3, BLOCK_SIZE, width, dtype=workload.cache_dtype or workload.dtype, device=device)
        q = torch.ones(sum(queries), LATENT_HEADS, width, dtype=workload.dtype, device=device)
        step = ForwardContext(positions, layout, [LatentCache(latents)], backend, plan)
        backend.latent(q, q[:, 0], 0, step, value_width=LATENT[0], scale=1.0)
    _wait(device)


def of_delta_rule(
    operations: Operations,
    workload: Workload,
    heads: RuleHeads,
    num_proposed: int,
    most_sequences: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Update states with a single token, and then, for each number of sequences, with a chunk and with proposals.

    There are 1 to *num_proposed* proposals. Kernels are compiled for the model's own heads, and the numbers of
    sequences and of proposals choose among them. So no later step needs another kernel. *progress* gets the number of
    steps that are done, and of all steps.
    """
    device = workload.device
    states = torch.zeros(most_sequences + num_proposed, *heads[1:], device=device)
    steps: list[tuple[tuple[int, ...], Trail]] = [((1,), None)]
    for count in range(1, most_sequences + 1):
        steps.append(((*(1,) * (count - 1), CHUNK), None))
        rows = torch.arange(count, device=device).unsqueeze(1)
        for number in range(1, num_proposed + 1):
            # The state after the last token goes to the sequence's own row. No state has a value, so all share others.
            others = torch.arange(most_sequences, most_sequences + number, device=device)
            steps.append(((1 + number,) * count, torch.cat((others.expand(count, -1), rows), 1)))
    for done, (lengths, trail) in enumerate(steps):
        progress(done, len(steps))
        gate = torch.zeros(heads.num_value_heads, device=device)
        q, k, v, b, a = _tokens(sum(lengths), heads, workload)
        rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
        operations.gated_delta_rule(q, k, v, Gates(gate, gate, a, b), states, rows, lengths, trail)
    _wait(device)


def _tokens(count: int, heads: RuleHeads, workload: Workload) -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values and gates of *count* tokens, as slices of wider rows, as a layer has them."""
    shapes = *((heads.num_key_heads, heads.key_width),) * 2, (heads.num_value_heads, heads.value_width)
    widths = [prod(shape) for shape in shapes]
    qkv, ba = (
        torch.ones(count, width, dtype=workload.dtype, device=workload.device)
        for width in (sum(widths), 2 * heads.num_value_heads)
    )
    parts = (part.unflatten(1, shape) for part, shape in zip(qkv.split(widths, 1), shapes, strict=True))
    return *parts, *ba.chunk(2, 1)


def of_tower(backend: VisionAttentionBackend, workload: Workload) -> None:
    """Compute attention within two sequences, with every head size."""
    lengths = (5, 3)
    borders = torch.tensor([0, 5, 8], dtype=torch.int32, device=workload.device)
    for size, _ in sorted(workload.head_sizes):
        q = torch.ones(sum(lengths), NUM_HEADS, size, dtype=workload.dtype, device=workload.device)
        backend.packed((q, q, q), PackedLayout(borders, max(lengths), lengths))
    _wait(workload.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
