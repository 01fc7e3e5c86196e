"""End reasoning that has used up its budget. No torch.

Whether it is due depends on the answer's tokens only, so preemption, replay and samples keep no state for it.
"""

from saccade.engine.core.grammar_matcher import add_ids, no_words
from saccade.engine.core.sequence import Sequence


def must_end_reasoning(sequence: Sequence) -> bool:
    """Whether the next token of the answer is the end of its reasoning."""
    budget = sequence.sampling.thinking_budget
    if budget is None:
        return False
    begin = sequence.num_prompt_tokens + (budget.start_id is not None)
    if sequence.num_tokens != begin + budget.num_tokens:
        return False
    is_reasoning = budget.start_id is None or sequence.token_ids[begin - 1] == budget.start_id
    return is_reasoning and budget.end_id not in sequence.token_ids[begin:]


def only(token_id: int, vocab_size: int) -> bytes:
    """Return the mask, of *vocab_size* logits, that allows only *token_id*."""
    return add_ids(no_words(vocab_size), [token_id], vocab_size).tobytes()
