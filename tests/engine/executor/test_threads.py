"""How many threads a step gets."""

import pytest
import torch

from saccade.engine.executor.threads import SERIAL_CONTEXT, SERIAL_PARAMETERS, SERIAL_WORK, Threads, choose_threads


@pytest.mark.parametrize(
    ("num_tokens", "num_context_tokens", "num_threads"),
    [(1, 0, 1), (8, SERIAL_CONTEXT, 1), (8, SERIAL_CONTEXT + 1, 2), (9, 0, 2), (4800, 0, 2)],
)
def test_small_steps_run_on_one_thread(num_tokens: int, num_context_tokens: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        Threads(2, 8).use(num_tokens, num_context_tokens)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_no_step_of_a_large_network_is_small() -> None:
    assert choose_threads(3, 600_000_000) == Threads(3, 0)
    assert choose_threads(3, SERIAL_PARAMETERS + 1) == Threads(3, 0)
    assert choose_threads(3, SERIAL_PARAMETERS) == Threads(3, SERIAL_WORK // SERIAL_PARAMETERS)
