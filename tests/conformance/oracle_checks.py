"""Prompts of text and images, and the comparison of an engine's answers with an oracle's."""

from pathlib import Path
from typing import Any

import engines
import torch
from references.networks import Oracle

from saccade.protocol.request import EngineRequest

PROMPTS: dict[str, list[Any]] = {
    "text": [37],
    "one image": [5, ((192, 128), 1), 9],
    "two images": [3, ((96, 160), 2), 6, ((320, 64), 3), 8],
    "image first and last": [((64, 64), 4), 7, ((96, 96), 5)],
    "image twice": [2, ((160, 96), 6), 3, ((160, 96), 6), 4],
}
RARE = frozenset(
    {"gemma4_e2b", "gemma4_unified", "glm4v_moe", "glm46v", "glm_ocr", "internvl_moe", "mistral3", "ministral3"}
)
"""Checkpoints that differ little from another, or have a decoder and a form of prompts that others have: the everyday
suite runs the others alone, and `make conformance` fewer sizes of chunks."""

LONG: list[list[Any]] = [
    [23],
    [4, ((64, 64), 1), 3, ((128, 96), 2), 1, ((96, 192), 3), 5, ((192, 64), 4), 2, ((160, 160), 5), 6],
]


def check(oracle: Oracle, asked: EngineRequest, token_ids: list[int], rows: list[torch.Tensor]) -> None:
    """Every logit that may be sampled equals the reference's, and every id is the reference's greedy choice.

    Where the reference's two best logits are closer than the tolerance allows for, either is right.
    """
    assert len(token_ids) == asked.sampling.max_tokens == len(rows)
    both = (torch.stack(rows), oracle.logits(asked, token_ids))
    placeholders = torch.tensor(oracle.placeholder_token_ids, dtype=torch.int64)
    ours, reference = (logits.index_fill(1, placeholders, float("-inf")) for logits in both)
    torch.testing.assert_close(ours, reference, atol=oracle.atol, rtol=0)
    chosen = reference.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    assert (reference.amax(1) - chosen <= 2 * oracle.atol).all()


def check_fresh_and_cached(oracle: Oracle, folder: Path, parts: list[Any], chunk: int) -> None:
    """A prompt of *parts*, computed in chunks and then repeated from the cache, is answered as by the reference."""
    subject = engines.engine(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    logits = engines.record_logits(subject)
    for request_id in ("fresh", "cached"):
        asked = engines.request(folder, parts, request_id, max_tokens=12)
        answer = engines.drain(subject, asked).answers[request_id]
        check(oracle, asked, answer.token_ids, logits[request_id])
    assert answer.num_cached_tokens == 16 * ((len(asked.token_ids) - 1) // 16)
