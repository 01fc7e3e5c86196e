"""Chooses the places in a prompt at which the recurrent state is worth keeping for later prompts.

Later prompts may ask other questions about the same images, begin with the same system turn, or extend this prompt by
the next turn. If two prompts share blocks and then differ, more such prompts may follow.

Does not import torch.
"""

from saccade.engine.core.sequence import Sequence

LEAST_GAIN_BLOCKS = 2
"""A state is not kept for fewer blocks: they are computed again at less cost than that of the state's place."""


def resume_points(sequence: Sequence, block_size: int, num_resumed: int, num_cached: int) -> frozenset[int]:
    """Return after how many prompt tokens of *sequence* to keep the state, always at block boundaries.

    The sequence resumes after *num_resumed* blocks; *num_cached* blocks have cached keys and values.
    """
    last = (sequence.num_prompt_tokens - 1) // block_size
    points = {last, min(_end_of_images(sequence) // block_size, last)}
    first_turn = _end_of_first_turn(sequence) // block_size
    if last - first_turn >= LEAST_GAIN_BLOCKS:
        points.add(first_turn)
    if num_cached - num_resumed >= LEAST_GAIN_BLOCKS:
        points.add(num_cached)
    return frozenset(point * block_size for point in points if point > num_resumed)


def _end_of_images(sequence: Sequence) -> int:
    """Return the number of tokens up to the end of the last image or video, or 0 if there is none."""
    return sequence.runs[-1].start + sequence.runs[-1].length if sequence.runs else 0


def _end_of_first_turn(sequence: Sequence) -> int:
    """Return the number of tokens up to the first one that would end an answer, or 0 if there is none.

    That token ends the first turn, which is usually the system's.
    """
    prompt, ends = sequence.token_ids[: sequence.num_prompt_tokens], set(sequence.sampling.stop_token_ids)
    return min((prompt.index(token_id) + 1 for token_id in ends.intersection(prompt)), default=0)
