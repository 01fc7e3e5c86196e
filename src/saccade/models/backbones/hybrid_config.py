"""The configuration of a decoder: few layers attend to all tokens, and the others keep a recurrent state. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.model_config import integer
from saccade.models.backbones.qwen_config import NORMED_STYLE, QwenTextConfig
from saccade.models.backbones.rope_scaling import rope_section
from saccade.models.spec import NETWORK_DTYPE, HeadCut, KvSpec, Paged, Recurrent

LINEAR, FULL = "linear_attention", "full_attention"
FULL_ATTENTION_INTERVAL = 4
PARTIAL_ROTARY_FACTOR = 0.25
STYLE = NORMED_STYLE._replace(mrope_section=(11, 11, 10))
"""Defaults of the releases' configuration class, for checkpoints that leave the keys out."""


@dataclass(frozen=True)
class DeltaNetConfig:
    """The layers with a state. Each key head serves equally many value heads."""

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    num_taps: int

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> "DeltaNetConfig":
        """Read `text_config`. Raises StartupError, naming the key."""
        config = cls(
            num_key_heads=integer(text, "linear_num_key_heads"),
            num_value_heads=integer(text, "linear_num_value_heads"),
            key_width=integer(text, "linear_key_head_dim"),
            value_width=integer(text, "linear_value_head_dim"),
            num_taps=integer(text, "linear_conv_kernel_dim", least=2),
        )
        if config.num_value_heads % config.num_key_heads:
            raise StartupError("config.json: `linear_num_value_heads` must be a multiple of `linear_num_key_heads`.")
        return config

    @property
    def heads(self) -> tuple[int, int, int]:
        """Number of heads of queries, keys and values."""
        return self.num_key_heads, self.num_key_heads, self.num_value_heads

    @property
    def widths(self) -> tuple[int, int, int]:
        """Number of channels of queries, keys and values."""
        keys = self.num_key_heads * self.key_width
        return keys, keys, self.num_value_heads * self.value_width

    @property
    def state(self) -> Recurrent:
        """A layer's state of a sequence: that of the delta rule, and the last inputs of the convolution."""
        rule = (self.num_value_heads, self.key_width, self.value_width)
        inputs = (self.num_taps - 1, sum(self.widths))
        parts = tuple((heads, width // heads) for heads, width in zip(self.heads, self.widths, strict=True))
        cuts = (HeadCut(0, ((self.num_value_heads, 1),)), HeadCut(1, parts))
        return Recurrent((rule, inputs), ("float32", NETWORK_DTYPE), cuts)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(QwenTextConfig):
    """*full_attention* are the layers that attend to all tokens. With experts, *intermediate_size* is the shared one.

    Each of the other layers has the state of *delta_net*.
    """

    delta_net: DeltaNetConfig
    full_attention: frozenset[int]

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> "HybridConfig":
        """Read `text_config`. Raises StartupError, naming the key."""
        if not text.get("attn_output_gate", True):
            raise StartupError("config.json: `attn_output_gate` is false; this network has an output gate.")
        factor = text.get("partial_rotary_factor", PARTIAL_ROTARY_FACTOR)
        filled = {**text, "rope_parameters": {"partial_rotary_factor": factor, **rope_section(text)}}
        if "shared_expert_intermediate_size" in text:
            filled["intermediate_size"] = integer(text, "shared_expert_intermediate_size")
        shared = QwenTextConfig.read(filled, STYLE)
        return cls(
            **{field.name: getattr(shared, field.name) for field in fields(shared)},
            delta_net=DeltaNetConfig.read(text),
            full_attention=_full_attention(text, shared.num_layers),
        )

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """Return paged attention for some layers, and a recurrent state for the others."""
        paged, recurrent = Paged(self.num_kv_heads, self.head_dim, self.head_dim), self.delta_net.state
        return tuple(paged if layer in self.full_attention else recurrent for layer in range(self.num_layers))


def _full_attention(text: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    kinds = text.get("layer_types")
    if kinds is None:
        interval = integer({"full_attention_interval": FULL_ATTENTION_INTERVAL, **text}, "full_attention_interval")
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {LINEAR, FULL}:
        raise StartupError(f"config.json: `layer_types` must name {num_layers} layers, each {LINEAR} or {FULL}.")
    full_layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    if not full_layers:
        raise StartupError(f"config.json: `layer_types` must name at least one layer of {FULL}.")
    return full_layers
