"""The attention sizes of each layer type, from either form of config.json. Does not import torch.

The releases have keys for the layers that attend to all tokens. Since 5.15, transformers writes `per_layer_config`
instead, which has the sizes of single layers. If that key is present, transformers reads no other.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from saccade.errors import StartupError
from saccade.models.backbones.layer_types import FULL, SLIDING
from saccade.models.backbones.model_config import flag, integer, part
from saccade.whole_numbers import read_whole_number

PER_LAYER: Final = "per_layer_config"
HEAD_DIM, KV_HEADS = "head_dim", "num_key_value_heads"
GLOBAL_OF: Final[Mapping[str, str]] = MappingProxyType(
    {HEAD_DIM: "global_head_dim", KV_HEADS: "num_global_key_value_heads"}
)
"""The releases' keys for the layers that attend to all tokens."""

GLOBAL_HEAD_DIM: Final = 512
"""The default of transformers' Gemma4TextConfig."""


class LayerSizes(NamedTuple):
    """A head's number of channels, and the number of key/value heads."""

    head_dim: int
    num_kv_heads: int


def layer_sizes(text: Mapping[str, Any], layers: Sequence[str]) -> Mapping[str, LayerSizes]:
    """Return the sizes by layer type; *layers* has the type of each layer. Raises a StartupError that names the key."""
    plain = LayerSizes(integer(text, HEAD_DIM), integer(text, KV_HEADS))
    named = _named_sizes(text, plain)
    sizes = {SLIDING: plain, FULL: named}
    if PER_LAYER not in text:
        return sizes
    by_layer = _sizes_by_layer(text, plain, len(layers))
    for kind in dict.fromkeys(layers):
        of_kind = dict.fromkeys(one for one, own in zip(by_layer, layers, strict=True) if own == kind)
        if len(of_kind) > 1:
            raise StartupError(
                f"config.json: `{PER_LAYER}` gives layers of {kind} different sizes of heads, "
                f"{' and '.join(str(tuple(one)) for one in of_kind)}; this network has one for each type of layers."
            )
        sizes[kind] = next(iter(of_kind))
    _check_equal(text, sizes[FULL], named)
    return sizes


def _named_sizes(text: Mapping[str, Any], plain: LayerSizes) -> LayerSizes:
    """Return the sizes that the releases' keys give the layers that attend to all tokens."""
    head_dim = integer({GLOBAL_OF[HEAD_DIM]: GLOBAL_HEAD_DIM, **_stated(text)}, GLOBAL_OF[HEAD_DIM])
    # The releases' number counts only where one matrix computes keys and values.
    counts = flag(text, "attention_k_eq_v") and text.get(GLOBAL_OF[KV_HEADS]) is not None
    return LayerSizes(head_dim, integer(text, GLOBAL_OF[KV_HEADS]) if counts else plain.num_kv_heads)


def _stated(text: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: text[key] for key in GLOBAL_OF.values() if text.get(key) is not None}


def _sizes_by_layer(text: Mapping[str, Any], plain: LayerSizes, num_layers: int) -> list[LayerSizes]:
    sizes = [plain] * num_layers
    entries: Mapping[Any, Any] = part(text, PER_LAYER)
    for key, own in entries.items():
        layer = key if type(key) is int else read_whole_number(str(key), num_layers)
        if layer is None or not 0 <= layer < num_layers or not isinstance(own, Mapping):
            raise StartupError(
                f"config.json: `{PER_LAYER}` must have objects under the numbers of layers, from 0 to "
                f"{num_layers - 1}, not {own!r} under {key!r}."
            )
        for name, value in own.items():
            if name not in GLOBAL_OF and value != text.get(name, [] if name == "skip" else ...):
                raise StartupError(
                    f"config.json: `{PER_LAYER}` sets `{name}` of layer {layer} to {value!r}; this network knows "
                    f"{' and '.join(GLOBAL_OF)} of single layers."
                )
        filled = {HEAD_DIM: plain.head_dim, KV_HEADS: plain.num_kv_heads, **own}
        sizes[layer] = LayerSizes(integer(filled, HEAD_DIM), integer(filled, KV_HEADS))
    return sizes


def _check_equal(text: Mapping[str, Any], full: LayerSizes, named: LayerSizes) -> None:
    """Raise StartupError if both forms are present and differ."""
    stated = _stated(text)
    for key, size, other in zip(GLOBAL_OF, full, named, strict=True):
        if GLOBAL_OF[key] in stated and size != other:
            raise StartupError(
                f"config.json: `{GLOBAL_OF[key]}` says {other}, but `{PER_LAYER}` gives layers of {FULL} {size} as "
                f"`{key}`; remove the wrong one."
            )
