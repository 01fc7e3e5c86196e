"""Reads a decoder's rotary frequencies from config.json, including those for contexts longer than in training.

Does not import torch.

Each method divides every channel pair's frequency by its own divisor. Formulas: transformers 5.23,
modeling_rope_utils.py. Linear: Chen et al. 2023, arXiv:2306.15595. YaRN: Peng et al. 2023, arXiv:2309.00071. Longrope:
Ding et al. 2024, arXiv:2402.13753.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from saccade.errors import StartupError
from saccade.models.backbones.model_config import integer, number, section

ORIGINAL_LENGTH = "original_max_position_embeddings"
"""The key of the length of the sequences in the training."""


class Rope(NamedTuple):
    """Rotary frequencies: 1 / (divisors[i] * theta^(i / pairs)) for channel pair i.

    The cosine and sine are multiplied by *magnitude*.

    Some decoders multiply attention scores by *score_factor*. *factors* says which of longrope's two sets applies.
    """

    theta: float
    divisors: tuple[float, ...]
    magnitude: float = 1.0
    score_factor: float = 1.0
    factors: str = ""


class _Source(NamedTuple):
    """A reader's input: the decoder's keys, its scaling keys, and the length of the longest sequence to serve."""

    text: Mapping[str, Any]
    scaling: Mapping[str, Any]
    theta: float
    num_pairs: int
    max_model_len: int

    @property
    def original_length(self) -> int:
        """The sequence length in training."""
        return original_length(self.text)


def rope_section(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's keys for rotary positions, or {} if there are none. Raises StartupError.

    Older releases have `rope_scaling` next to `rope_theta`; newer ones put both into `rope_parameters`.
    """
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    return section(text, key) if text.get(key) else {}


def original_length(text: Mapping[str, Any]) -> int:
    """Return the sequence length in training, from the decoder's keys *text*. Raises StartupError."""
    holder = next((one for one in (text, rope_section(text)) if one.get(ORIGINAL_LENGTH) is not None), None)
    return integer(text, "max_position_embeddings") if holder is None else integer(holder, ORIGINAL_LENGTH, least=2)


def read_rope(text: Mapping[str, Any], head_dim: int, max_model_len: int, rotary_factor: float = 1.0) -> Rope:
    """Return the rotary frequencies of a decoder that serves sequences of up to *max_model_len* tokens.

    *rotary_factor* is the share of a head's channels that the decoder rotates. *max_model_len* decides which of
    longrope's two sets of factors applies, to sequences of any length. Raises a StartupError that names the key.
    """
    scaling = rope_section(text)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in READERS:
        raise StartupError(f"config.json: rope type {kind!r} is not served; known: {', '.join(READERS)}.")
    if scaling.get("partial_rotary_factor", text.get("partial_rotary_factor", rotary_factor)) != rotary_factor:
        raise StartupError(f"config.json: only a `partial_rotary_factor` of {rotary_factor} is served by this network.")
    theta = number(scaling if "rope_theta" in scaling else text, "rope_theta")
    return READERS[kind](_Source(text, scaling, theta, int(head_dim * rotary_factor) // 2, max_model_len))


def longest(text: Mapping[str, Any]) -> int:
    """Return the length of the longest sequence, in tokens. Raises StartupError.

    It is the larger of `max_position_embeddings` and the training length times YaRN's factor: operators who add YaRN as
    a release's README tells them may leave `max_position_embeddings` unchanged.
    """
    scaling, stated = rope_section(text), integer(text, "max_position_embeddings")
    original = scaling.get(ORIGINAL_LENGTH)
    if scaling.get("rope_type", scaling.get("type")) != "yarn" or original is None:
        return stated
    return max(stated, int(integer(scaling, ORIGINAL_LENGTH) * number(scaling, "factor")))


def _default(source: _Source) -> Rope:
    return Rope(source.theta, (1.0,) * source.num_pairs)


def _linear(source: _Source) -> Rope:
    return Rope(source.theta, (number(source.scaling, "factor"),) * source.num_pairs)


def _llama3(source: _Source) -> Rope:
    """Stretch long waves by the factor, leave short ones, and interpolate in between."""
    factor, low, high = (number(source.scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise StartupError("config.json: `low_freq_factor` must be below `high_freq_factor`.")
    frequencies = (source.theta ** (-pair / source.num_pairs) for pair in range(source.num_pairs))
    turns = (source.original_length * frequency / (2 * math.pi) for frequency in frequencies)
    shares = (min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns)
    return Rope(source.theta, tuple(1 / ((1 - share) / factor + share) for share in shares))


def _yarn(source: _Source) -> Rope:
    """Stretch long waves by the factor, leave short ones, and interpolate in between.

    The score factor is DeepSeek-V3's: transformers, modeling_deepseek_v3.py, yarn_apply_mscale.
    """
    scaling, width = source.scaling, 2 * source.num_pairs
    factor, original = number(scaling, "factor"), source.original_length
    fast, slow = (_number_or(scaling, key, default) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    first, last = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(source.theta)) for turns in (fast, slow)
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = max(last - first, 0.001)
    stretched = (min(max((pair - first) / span, 0.0), 1.0) for pair in range(source.num_pairs))
    divisors = tuple(1 / (share / factor + 1 - share) for share in stretched)
    whole = _magnitude(factor, _number_or(scaling, "mscale_all_dim", 0.0))
    magnitude = _magnitude(factor, 1.0)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        magnitude = _magnitude(factor, number(scaling, "mscale")) / whole
    return Rope(source.theta, divisors, _number_or(scaling, "attention_factor", magnitude), whole**2)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0


def _number_or(scaling: Mapping[str, Any], key: str, otherwise: float) -> float:
    """Return the positive number under *key*, or *otherwise* if it is null, zero or missing."""
    return number(scaling, key) if scaling.get(key) else otherwise


def _longrope(source: _Source) -> Rope:
    scaling, original = source.scaling, source.original_length
    short, long = (_factors(scaling, key, source.num_pairs) for key in ("short_factor", "long_factor"))
    divisors, factors = (long, "long") if source.max_model_len > original else (short, "short")
    if scaling.get("attention_factor") is not None:
        return Rope(source.theta, divisors, number(scaling, "attention_factor"), factors=factors)
    stated = scaling.get("factor") is not None
    longer = number(scaling, "factor") if stated else integer(source.text, "max_position_embeddings") / original
    magnitude = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
    return Rope(source.theta, divisors, magnitude, factors=factors)


def _factors(scaling: Mapping[str, Any], key: str, num_pairs: int) -> tuple[float, ...]:
    factors = scaling.get(key)
    are_numbers = isinstance(factors, list) and all(type(one) in (int, float) and one > 0 for one in factors)
    if isinstance(factors, list) and are_numbers and len(factors) == num_pairs:
        return tuple(map(float, factors))
    raise StartupError(
        f"config.json: `{key}` must list {num_pairs} positive numbers, one for each pair of a head's channels."
    )


READERS: Mapping[str, Callable[[_Source], Rope]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "su": _longrope,
        "mrope": _default,
    }
)
"""Readers by the type in config.json. Of early releases, `su` is longrope, and `mrope` the default on three axes."""
