"""Rotary embeddings (Su et al. 2021, arXiv:2104.09864), 1-D and multimodal.

Multimodal positions have three axes (time, height, width). Formulas: transformers, modeling_qwen3_vl.py
and modeling_qwen2_vl.py (get_rope_index, recomposition_frequencies), and Qwen2-VL, arXiv:2409.12191, section 2.1.
Shapes: N tokens, H heads, D head size.
"""

from collections.abc import Sequence

import torch


def inverse_frequencies(
    theta: float, size: int, device: torch.device, divisors: Sequence[float] | None = None
) -> torch.Tensor:
    """Return theta^(-2i/size) for i < size / 2, divided by divisors[i], float32."""
    powers = theta ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    return 1.0 / (powers if divisors is None else torch.tensor(divisors, device=device) * powers)


def interleaved_axes(section: Sequence[int]) -> list[int]:
    """Return the axis (0 time, 1 height, 2 width) that rotates each channel: T H W T H W ..., and T for the rest.

    *section* counts the channels of each axis; the caller has checked that they sum to half the head size.
    """
    axes = [0] * sum(section)
    for axis in (1, 2):
        for channel in range(axis, 3 * section[axis], 3):
            axes[channel] = axis
    return axes


def chunked_axes(section: Sequence[int]) -> list[int]:
    """Return the axis that rotates each channel; the channels of an axis are neighbours. See interleaved_axes."""
    return [axis for axis, count in enumerate(section) for _ in range(count)]


def cos_sin(angles: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [N, 1, D] for `ops.rotary`, from float32 angles [N, D / 2]; half of sine is negated.

    Both are multiplied by *magnitude*, which some ways to lengthen contexts need. Raises ValueError for angles of
    another shape: the caller must already have reduced three axes to one angle per channel.
    """
    if angles.ndim != 2:
        raise ValueError(f"A rotation takes one angle for each token and channel, [N, D / 2], not {[*angles.shape]}.")
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype)


def cos_sin_pairs(angles_NC: torch.Tensor) -> torch.Tensor:
    """Return cos + i sin [N, 1, D / 2], complex64, for `ops.rotary_pairs`, from float32 angles [N, D / 2]."""
    return torch.polar(torch.ones_like(angles_NC), angles_NC).unsqueeze(1)
