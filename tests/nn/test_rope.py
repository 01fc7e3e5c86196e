"""Rotary positions: three axes, one formula wherever a sequence is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade.models.positions import GridSpan, MultimodalPositions
from saccade.nn.backends import load_backend
from saccade.nn.context import ForwardContext, PagedLayout
from saccade.nn.ops import rotary_pairs
from saccade.nn.rope import chunked_axes, cos_sin, cos_sin_pairs, interleaved_axes


def test_positions_of_an_image_between_texts() -> None:  # [eng] 1
    positions = MultimodalPositions([GridSpan(2, (1, 3, 4))]).slice(0, 16)
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:14].tolist() == [2] * 12
    assert positions[1, 2:14].tolist() == [2] * 4 + [3] * 4 + [4] * 4
    assert positions[2, 2:14].tolist() == [2, 3, 4, 5] * 3
    assert positions[:, 14:].tolist() == [[6, 7]] * 3


def test_answer_continues_after_the_largest_axis() -> None:  # [eng] 4: a prompt that ends in an image
    positions = MultimodalPositions([GridSpan(2, (1, 3, 4))])
    assert positions.slice(14, 17).tolist() == [[6, 7, 8]] * 3
    assert positions.delta == 6 - 14


SPANS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), max_size=4)


@given(SPANS, st.floats(0.01, 5), st.integers(0, 60), st.integers(1, 60))
def test_any_slice_equals_the_whole(
    parts: list[tuple[int, int, int, int]], step: float, start: int, length: int
) -> None:
    spans, index = [], 0
    for text, *grid in parts:
        spans.append(GridSpan(index + text, tuple(grid), step))  # type: ignore[arg-type]
        index += text + int(np.prod(grid))
    positions = MultimodalPositions(spans)
    whole = positions.slice(0, 120 + index)
    assert np.array_equal(positions.slice(start, start + length), whole[:, start : start + length])
    assert np.array_equal(whole[:, index:], np.tile(np.arange(index, 120 + index) + positions.delta, (3, 1)))


@pytest.mark.parametrize(
    ("section", "axes"), [((2, 2, 2), "THWTHW"), ((4, 2, 2), "THWTHWTT"), ((11, 11, 10), "THW" * 10 + "TH")]
)
def test_interleaved_axes(section: tuple[int, int, int], axes: str) -> None:
    assert "".join("THW"[axis] for axis in interleaved_axes(section)) == axes


def test_chunked_axes() -> None:
    assert "".join("THW"[axis] for axis in chunked_axes((4, 1, 2))) == "TTTTHWW"


def test_video_advances_in_time() -> None:  # B5, [eng] 4: the type knows more frames than an image has
    positions = MultimodalPositions([GridSpan(1, (3, 1, 2)), GridSpan(9, (2, 2, 1))])
    assert positions.slice(0, 14).tolist() == [
        [0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7, 7, 8],
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 7, 6, 7, 8],
        [0, 1, 2, 1, 2, 1, 2, 4, 5, 6, 6, 6, 6, 8],
    ]


def test_three_axes_fit_no_kernel_for_one() -> None:  # [eng] 13
    """A rotation of one angle a channel takes no third dimension, and a step no positions of one axis."""
    with pytest.raises(ValueError, match=r"\[3, 5, 2\]"):
        cos_sin(torch.zeros(3, 5, 2), torch.float32)
    tokens = torch.zeros(5, dtype=torch.int64)
    layout = PagedLayout(tokens, tokens.view(1, 5), tokens[:1], (5,), (5,), 0, 16, tokens[:1])
    for shape in ((5,), (1, 5), (5, 3), (3, 4)):
        with pytest.raises(ValueError, match=r"are \[3, 5\]"):
            ForwardContext(torch.zeros(shape, dtype=torch.int64), layout, [], load_backend("torch_sdpa"), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_side_by_side_rotate_like_pairs_apart(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, angles = torch.randn(5, 3, 8, generator=random).to(dtype), torch.randn(5, 4, generator=random)
    cos, sin = cos_sin(angles, torch.float32)
    apart = (x.float() * cos + x.float().roll(4, -1) * sin).to(dtype)
    paired = rotary_pairs(x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2), cos_sin_pairs(angles))
    assert paired.dtype == dtype
    torch.testing.assert_close(paired.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2), apart)
