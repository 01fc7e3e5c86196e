"""Find the results of a step that are not finite: NaN and infinities.

As long as sums stay below 3e38, a sum is finite exactly if all its summands are. A sum over a row is the fastest
reduction there is. The hidden states of every token are summed. If a token's keys, values or recurrent states are not
finite, its own hidden state is not finite either, since a token attends to itself. Sums leave the device with the
step's output, so the host waits for nothing more. Shapes: N tokens, S chunks, R draws, E hidden size.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt
import torch

from saccade.engine.core.step import Chunk, NonFinite, SamplingInput, StepInput
from saccade.nn.transfer import to_device

IMAGES, HIDDEN, DRAWS, PROMPTS, DRAFTS = "images", "hidden", "draws", "prompts", "drafts"
"""The sums: features by image; hidden states by chunk; logits by draw and by PromptScores; the draft layer's
states by chunk.
"""


def sums_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return float32 sums over the last dimension."""
    return x.sum(-1, dtype=torch.float32)


def sums_of_all(tensors: Ordered[torch.Tensor]) -> torch.Tensor:
    """Return a float32 sum of each tensor."""
    return torch.stack([one.sum(dtype=torch.float32) for one in tensors])


def sums_of_chunks(x_NE: torch.Tensor, chunks: Ordered[Chunk]) -> torch.Tensor:
    """Return a float32 sum for each of *chunks*, over its tokens. The chunks lie one after the other."""
    rows_N = sums_of_rows(x_NE)
    if len(rows_N) == len(chunks):
        return rows_N
    owner_N = np.repeat(np.arange(len(chunks)), [chunk.num_tokens for chunk in chunks])
    return rows_N.new_zeros(len(chunks)).index_add_(0, to_device(owner_N, rows_N.device), rows_N)


def verdict(step: StepInput, sampling: SamplingInput, sums: Mapping[str, npt.NDArray[np.float64]]) -> NonFinite:
    """Return which results of *step* are not finite, judged by their *sums* on the host."""
    wrong = {name: np.flatnonzero(~np.isfinite(values)).tolist() for name, values in sums.items()}
    if not any(wrong.values()):
        return NonFinite()
    drawing = [number for number, chunk in enumerate(step.chunks) for _ in range(chunk.num_draws)]
    chunk_of = {chunk.row: number for number, chunk in enumerate(step.chunks)}
    chunks = {
        *wrong.get(HIDDEN, ()),
        *(drawing[draw] for draw in wrong.get(DRAWS, ())),
        *(chunk_of[sampling.prompt_scores[number].row] for number in wrong.get(PROMPTS, ())),
    }
    images = tuple(step.encoded[number] for number in wrong.get(IMAGES, ()))
    return NonFinite(tuple(sorted(chunks)), tuple(wrong.get(DRAFTS, ())), images)
