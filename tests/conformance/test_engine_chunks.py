"""A prompt cut into chunks of every size is answered as its oracle does."""

from dataclasses import replace
from pathlib import Path

import engines
import pytest
from oracle_checks import PROMPTS, RARE, check
from references.networks import Oracle


def chunk_sizes(num_tokens: int, is_rare: bool) -> list[int]:
    """Every size, or those around blocks and the end: of rare checkpoints, and of prompts with hundreds of tokens."""
    if num_tokens <= 100 and not is_rare:
        return list(range(1, num_tokens + 1))
    sizes = {1, 2, 3, 7, 15, 16, 17, 31, 64, 100, num_tokens // 2, num_tokens - 1, num_tokens}
    return sorted(size for size in sizes if 0 < size <= num_tokens)


@pytest.mark.aspect("chunks")
@pytest.mark.conformance
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROMPTS)
def test_every_chunk_size_equals_the_reference(
    folder: Path, oracle: Oracle, name: str, checkpoint_name: str
) -> None:  # [eng] 24
    asked = engines.request(folder, PROMPTS[name], max_tokens=4)
    subject = engines.engine(folder, max_num_seqs=1)
    logits = engines.record_logits(subject)
    for number, chunk in enumerate(chunk_sizes(len(asked.token_ids), checkpoint_name in RARE), 1):
        subject.scheduler.reset_caches(prefix=True, media=True)
        subject.scheduler.budgets = replace(subject.scheduler.budgets, max_num_batched_tokens=chunk)
        logits["a"].clear()
        answer = engines.drain(subject, asked).answers["a"]
        check(oracle, asked, answer.token_ids, logits["a"])
        assert answer.num_cached_tokens == 0
        assert subject.load().encoded_items_total == number * len({item.content_hash for item in asked.media})
