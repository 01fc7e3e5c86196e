"""Remembered keys are those that are computed anew."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from saccade.fleet.prompt_keys import BYTES_PER_KEY, BYTES_PER_SEGMENT, SEGMENT_BLOCKS, PromptKeys
from saccade.identity.blocks import MediaRun, block_keys, root_key

ROOT = root_key(b"model", b"")
SEGMENT = 2 * SEGMENT_BLOCKS


@given(
    length=st.integers(0, 3 * SEGMENT),
    images=st.lists(st.tuples(st.integers(0, SEGMENT), st.integers(1, 2 * SEGMENT)), max_size=3),
    changed=st.integers(0, 3 * SEGMENT),
)
def test_keys_by_segments_are_the_keys(length: int, images: list[tuple[int, int]], changed: int) -> None:  # F3
    keys = PromptKeys()
    token_ids = [number % 7 for number in range(length)]
    runs, start = [], 0
    for number, (gap, size) in enumerate(images):
        runs.append(MediaRun(start + gap, size, bytes([number]) * 32, offset=number))
        start += gap + size
    other_runs = [run._replace(content_hash=b"x" * 32) for run in runs]
    for ids in (token_ids, [*token_ids[:changed], 9, *token_ids[changed + 1 :]]):
        for imaged in (runs, other_runs, []):
            for block_size in (2, 3):
                for _ in range(2):
                    assert keys.of(ROOT, ids, imaged, block_size) == block_keys(ROOT, ids, imaged, block_size)


def test_seen_prompts_are_remembered_up_to_a_limit() -> None:
    keys = PromptKeys(2 * (SEGMENT_BLOCKS * BYTES_PER_KEY + BYTES_PER_SEGMENT))
    prompt = list(range(SEGMENT))
    first = keys.of(ROOT, prompt, (), 2)
    assert keys.of(ROOT, [*prompt, 1, 2], (), 2)[0] is first[0]
    for number in range(2):
        keys.of(ROOT, [number, *prompt], (), 2)
    assert keys.of(ROOT, prompt, (), 2)[0] is not first[0]


@pytest.mark.ci
@table("num_images", [0, 100])
def test_short_prompts_and_many_images_take_no_more_memory_than_the_limit(num_images: int) -> None:
    keys = PromptKeys(1 << 18)
    tracemalloc.start()
    for number in range(1000):
        runs = [MediaRun(300 + each, 1, number.to_bytes(32, "little"), 300) for each in range(num_images)]
        keys.of(ROOT, [number] * (4 * num_images + 1), runs, 16)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 17 < keys.num_bytes <= 1 << 18
    assert num_bytes < 2 * keys.num_bytes
