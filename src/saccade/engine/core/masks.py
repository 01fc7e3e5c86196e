"""The tokens that rows may draw in a step, if a grammar or the end of their reasoning limits them. No torch."""

from saccade.engine.core.grammar_matcher import add_ids, no_words
from saccade.engine.core.schedule import Fail, Schedule
from saccade.engine.core.sequence import Sequence
from saccade.errors import InvalidValue

Masks = dict[Sequence, bytes]
"""Sets of token ids: bit i of a mask, in little-endian order, is set for token id i."""


def masks_of(schedule: Schedule, vocab_size: int, fail: Fail) -> Masks:
    """Return the masks of sequences that draw in this step, after those that no token can continue have failed."""
    masks = Masks()
    for sequence, num_tokens in list(schedule.chunks.items()):
        if sequence.num_launched_tokens + num_tokens < sequence.num_expected_tokens:
            continue
        budget = sequence.sampling.thinking_budget
        if budget is not None and must_end_reasoning(sequence):
            masks[sequence] = add_ids(no_words(vocab_size), [budget.end_id], vocab_size).tobytes()
        elif sequence.matcher is not None and sequence in schedule.chunks:
            try:
                masks[sequence] = sequence.matcher.mask()
            except InvalidValue as error:
                fail(sequence, error.at("grammar"))
    return masks


def must_end_reasoning(sequence: Sequence) -> bool:
    """Whether the next token of the answer is the end of its reasoning, which has used up its budget.

    This depends on the answer's tokens only, so preemption, replay and samples keep no state for it.
    """
    budget = sequence.sampling.thinking_budget
    if budget is None:
        return False
    begin = sequence.num_prompt_tokens + (budget.start_id is not None)
    if sequence.num_tokens != begin + budget.num_tokens:
        return False
    is_reasoning = budget.start_id is None or sequence.token_ids[begin - 1] == budget.start_id
    return is_reasoning and budget.end_id not in sequence.token_ids[begin:]
