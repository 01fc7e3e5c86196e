"""Copies to a device, for which the host does not wait."""

from pathlib import Path

import numpy as np
import torch

import saccade
from saccade.nn.transfer import to_device, transfer


def test_nothing_else_copies_to_a_device_without_waiting() -> None:
    """A copy from memory that is not pinned makes the host wait, or reads memory that may be used anew."""
    root = Path(saccade.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if "non_blocking=True" in path.read_text()}
    # The other one copies to the host, into pinned memory.
    assert found == {"nn/transfer.py", "engine/executor/logprobs.py"}


def test_arrays_keep_their_shapes_and_values() -> None:
    arrays = [np.arange(6).reshape(2, 3), np.arange(0), np.array(7), np.arange(8).reshape(4, 2).T]
    for array, tensor in zip(arrays, transfer(arrays, torch.device("cpu")), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        np.testing.assert_array_equal(to_device(array, torch.device("cpu")).numpy(), array)
