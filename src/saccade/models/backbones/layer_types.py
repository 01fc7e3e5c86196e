"""Reads the type of each layer from config.json, for a decoder with two layer types. Does not import torch."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from saccade.errors import StartupError
from saccade.models.backbones.model_config import integer

LINEAR: Final = "linear_attention"
SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


def layer_types(text: Mapping[str, Any], other: str, interval: Callable[[], int]) -> list[str]:
    """Return each layer's type, FULL or *other*, from `layer_types`.

    Without that key, every `interval()`-th layer is FULL. Raises a StartupError that names the key.
    """
    num_layers, types = integer(text, "num_hidden_layers"), text.get("layer_types")
    if types is None:
        every = interval()
        types = [other if (layer + 1) % every else FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {other, FULL}:
        raise StartupError(f"config.json: `layer_types` must name {num_layers} layers, each {other} or {FULL}.")
    return types


def check_window(text: Mapping[str, Any], *, is_in_all: bool) -> None:
    """Raise StartupError if `layer_types` contradicts the window.

    With *is_in_all*, every layer must have the window. Otherwise no layer may have one.

    transformers reads the list in some of these decoders, and vLLM in others.
    """
    types = text.get("layer_types") or []
    others = {FULL} if is_in_all else {SLIDING}
    if not isinstance(types, list) or any(kind in others for kind in types):
        every = f"all layers have the window of `sliding_window`, {text.get('sliding_window')!r}"
        served = every if is_in_all else "no layer of this network has a window"
        raise StartupError(f"config.json: `layer_types` is {types!r}, but {served}.")


def check_has_full(types: list[str]) -> None:
    """Raise StartupError unless one of *types* is FULL."""
    if FULL not in types:
        raise StartupError(f"config.json: `layer_types` must name at least one layer of {FULL}.")
