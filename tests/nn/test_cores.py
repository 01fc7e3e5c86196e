"""Weights that several threads prepare at the same time."""

import threading

import torch

from saccade.nn.cores import map_on_cores

CPU = torch.device("cpu")


def test_each_thread_has_a_weight_of_its_own() -> None:
    """They run at the same time, results are in order, and the caller's number of threads stays."""
    together = threading.Barrier(2, timeout=60)

    def work(number: int) -> tuple[int, int]:
        together.wait()
        return number, torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert list(map_on_cores(work, range(6), CPU)) == [(number, 1) for number in range(6)]
        assert torch.get_num_threads() == 2
        assert set(map_on_cores(lambda _: threading.current_thread(), [0, 1], torch.device("meta"))) == {
            threading.current_thread()
        }
    finally:
        torch.set_num_threads(before)
