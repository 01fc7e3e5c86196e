"""An embedding that reads its vectors from the packed head: the same ones, and only if the layout is understood."""

import pytest
import torch
from products import drawn
from tables import table

from saccade.nn.formats.int8 import rounded_rows
from saccade.nn.formats.onednn_int8 import Int8Product
from saccade.nn.layers import Embedding, Linear, use_operations
from saccade.nn.ops import resolve

WIDTHS = (64, 200, 2048)


def embedding(num_ids: int, width: int, dtype: torch.dtype) -> Embedding:
    subject = Embedding(num_ids, width).to(dtype)
    subject.weight.data = drawn(num_ids, width).to(dtype)
    return subject


def packed_head(subject: Embedding, *, rounds: bool) -> Linear:
    """The head that is tied to *subject*, packed."""
    head = Linear.of(subject.weight.data)
    if rounds:
        head.round_weight(rounded_rows)
    use_operations(head, resolve("cpu", subject.weight.dtype))
    return head


@table("width", WIDTHS)
@table("num_ids", [130, 1000, 4096])
def test_vectors_of_a_bfloat16_head_are_the_same(num_ids: int, width: int) -> None:
    subject = embedding(num_ids, width, torch.bfloat16)
    every = torch.arange(num_ids).flip(0)
    expected = subject(every)
    head = packed_head(subject, rounds=False)
    assert head.packed is not None
    subject.read_from(head.packed)
    assert torch.equal(subject(every), expected)
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        assert subject.weight.numel() == 0


@table("dtype", [torch.float32, torch.bfloat16])
@table("width", WIDTHS)
@table("num_ids", [130, 1000, 4096])
def test_vectors_of_an_int8_head_are_its_rounded_ones(num_ids: int, width: int, dtype: torch.dtype) -> None:
    subject = embedding(num_ids, width, dtype)
    every = torch.arange(num_ids).flip(0)
    expected = rounded_rows(subject.weight.data).dequantised(torch.float32)[every].to(dtype)
    head = packed_head(subject, rounds=True)
    assert isinstance(head.packed, Int8Product)
    subject.read_from(head.packed)
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        assert subject.weight.numel() == 0
        assert torch.equal(subject(every), expected)
    assert subject(every[:0]).shape == (0, width)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_head_with_other_values_is_not_read(rounds: bool) -> None:
    """So neither is one in a layout that is not known: its values come from other places."""
    subject = embedding(1000, 64, torch.bfloat16)
    other = embedding(1000, 64, torch.bfloat16)
    other.weight.data[999, 63] += 1
    head = packed_head(other, rounds=rounds)
    assert head.packed is not None
    subject.read_from(head.packed)
    assert len(subject.weight) == 1000
