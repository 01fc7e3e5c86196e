"""The config.json of DeepSeek-V3's decoder, checked, for networks and specs. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, integer, number
from saccade.models.backbones.rope_scaling import Rope, read_rope
from saccade.models.spec import Latent


@dataclass(frozen=True)
class ExpertConfig:
    """Routed experts and shared experts. Every token uses *num_chosen* of the routed experts, and all shared ones.

    The experts are in *num_groups* groups of equal size; a token chooses within its best *num_chosen_groups*. The
    weights of a token's experts are multiplied by *scaling*; with *normalised* they sum to 1 before that.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_intermediate_size: int
    num_groups: int
    num_chosen_groups: int
    normalised: bool
    scaling: float

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> "ExpertConfig":
        """Read `text_config`. Raises StartupError, naming the key."""
        for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
            if text.get(key, supported) != supported:
                raise StartupError(f"config.json: `{key}` is {text[key]!r}; this network knows {supported!r}.")
        width = integer(text, "moe_intermediate_size")
        config = cls(
            num_experts=integer(text, "n_routed_experts"),
            num_chosen=integer(text, "num_experts_per_tok"),
            intermediate_size=width,
            shared_intermediate_size=width * integer(text, "n_shared_experts"),
            num_groups=integer(text, "n_group"),
            num_chosen_groups=integer(text, "topk_group"),
            normalised=bool(text.get("norm_topk_prob", True)),
            scaling=number(text, "routed_scaling_factor"),
        )
        per_group, rest = divmod(config.num_experts, config.num_groups)
        if rest or (config.num_groups > 1 and per_group < 2):
            raise StartupError("config.json: `n_routed_experts` must be `n_group` groups of at least two experts.")
        if config.num_chosen_groups > config.num_groups:
            raise StartupError("config.json: `topk_group` must not exceed `n_group`.")
        if config.num_chosen > per_group * config.num_chosen_groups:
            raise StartupError("config.json: `num_experts_per_tok` exceeds the experts of `topk_group` groups.")
        return config


@dataclass(frozen=True)
class DeepseekTextConfig:
    """The decoder's part of config.json, checked.

    A token's keys come from *latent_width* channels, shared by all heads, and *rope_width* rotated channels;
    a head's query has *plain_width* and *rope_width* channels, its value *value_width*. *query_latent_width* is None if
    queries are computed directly from the hidden state. The first *num_dense_layers* layers have an MLP, the rest
    experts. Checkpoints may hold *num_draft_layers* after the last layer, which predict further tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_draft_layers: int
    num_dense_layers: int
    num_heads: int
    latent_width: int
    query_latent_width: int | None
    plain_width: int
    rope_width: int
    value_width: int
    max_position_embeddings: int
    norm_eps: float
    attention_bias: bool
    rope: Rope
    experts: ExpertConfig | None

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> "DeepseekTextConfig":
        """Read `text_config`. Raises StartupError, naming the key."""
        choice(text, "hidden_act", ("silu",))
        num_layers, num_dense = integer(text, "num_hidden_layers"), integer(text, "first_k_dense_replace", least=0)
        rope_width, max_positions = integer(text, "qk_rope_head_dim"), integer(text, "max_position_embeddings")
        if text.get("rope_interleave", True) is not True:
            raise StartupError("config.json: `rope_interleave` must be true for this network.")
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            if integer(text, key) % 2:
                raise StartupError(f"config.json: `{key}` must be even, not {text[key]}.")
        return cls(
            vocab_size=integer(text, "vocab_size"),
            hidden_size=integer(text, "hidden_size"),
            intermediate_size=integer(text, "intermediate_size"),
            num_layers=num_layers,
            num_draft_layers=integer({"num_nextn_predict_layers": 0, **text}, "num_nextn_predict_layers", least=0),
            num_dense_layers=min(num_dense, num_layers),
            num_heads=integer(text, "num_attention_heads"),
            latent_width=integer(text, "kv_lora_rank"),
            query_latent_width=None if text.get("q_lora_rank") is None else integer(text, "q_lora_rank"),
            plain_width=integer(text, "qk_nope_head_dim"),
            rope_width=rope_width,
            value_width=integer(text, "v_head_dim"),
            max_position_embeddings=max_positions,
            norm_eps=number(text, "rms_norm_eps"),
            attention_bias=bool(text.get("attention_bias", False)),
            rope=read_rope(text, rope_width, max_positions),
            experts=ExpertConfig.read(text) if num_dense < num_layers else None,
        )

    @property
    def kv_specs(self) -> tuple[Latent, ...]:
        """Return latent attention for every layer."""
        return (Latent(self.latent_width, self.rope_width),) * self.num_layers

    @property
    def score_scale(self) -> float:
        """The factor of the products of queries and keys."""
        return float((self.plain_width + self.rope_width) ** -0.5 * self.rope.score_factor)
