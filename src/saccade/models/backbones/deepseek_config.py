"""Reads and checks the config.json of DeepSeek-V3's decoder, for networks and specs. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from saccade.errors import StartupError
from saccade.models.backbones.model_config import check_equal, flag, integer, values_of
from saccade.models.backbones.rope_scaling import read_rope
from saccade.models.backbones.text_config import DecoderConfig, TextStyle
from saccade.models.spec import KvSpec, Latent


@dataclass(frozen=True)
class ExpertConfig:
    """Routed experts and shared experts. Every token uses *num_chosen* of the routed experts and all the shared ones.

    The experts form *num_groups* groups of equal size; a token's experts come from its best *num_chosen_groups*. With
    *normalised*, the weights of these experts are scaled to sum to 1. They are then multiplied by *scaling*.
    """

    num_experts: Annotated[int, "n_routed_experts"]
    num_chosen: Annotated[int, "num_experts_per_tok"]
    intermediate_size: Annotated[int, "moe_intermediate_size"]
    shared_intermediate_size: int
    num_groups: Annotated[int, "n_group"]
    num_chosen_groups: Annotated[int, "topk_group"]
    normalised: bool
    scaling: Annotated[float, "routed_scaling_factor"]

    @classmethod
    def read_experts(cls, text: Mapping[str, Any]) -> "ExpertConfig":
        """Read `text_config`. Raises a StartupError that names the key."""
        check_equal(text, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
        config = cls(
            shared_intermediate_size=integer(text, "moe_intermediate_size") * integer(text, "n_shared_experts"),
            normalised=flag(text, "norm_topk_prob"),
            **values_of(cls, text),
        )
        per_group, rest = divmod(config.num_experts, config.num_groups)
        if rest or (config.num_groups > 1 and per_group < 2):
            raise StartupError("config.json: `n_routed_experts` must be `n_group` groups of at least two experts.")
        if config.num_chosen_groups > config.num_groups:
            raise StartupError("config.json: `topk_group` must not exceed `n_group`.")
        if config.num_chosen > per_group * config.num_chosen_groups:
            raise StartupError("config.json: `num_experts_per_tok` exceeds the experts of `topk_group` groups.")
        return config


@dataclass(frozen=True, kw_only=True)
class DeepseekTextConfig(DecoderConfig):
    """The configuration of a decoder with attention over latents.

    All heads share a token's latent of *latent_width* channels and its *rope_width* rotated channels. A head's query
    has *plain_width* plus *rope_width* channels, and its value has *value_width*. *query_latent_width* is None if
    queries are computed directly from the hidden state. The first *num_dense_layers* layers have an MLP, and the rest
    have experts. After the last layer, checkpoints may hold *num_draft_layers* more, which predict further tokens.
    """

    latent_width: Annotated[int, "kv_lora_rank"]
    plain_width: Annotated[int, "qk_nope_head_dim"]
    rope_width: Annotated[int, "qk_rope_head_dim"]
    value_width: Annotated[int, "v_head_dim"]
    query_latent_width: int | None
    num_draft_layers: int
    num_dense_layers: int
    experts: ExpertConfig | None

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        num_layers, num_dense = integer(text, "num_hidden_layers"), integer(text, "first_k_dense_replace", least=0)
        max_positions = integer(text, "max_position_embeddings")
        if text["rope_interleave"] is not True:
            raise StartupError("config.json: `rope_interleave` must be true for this network.")
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            if integer(text, key) % 2:
                raise StartupError(f"config.json: `{key}` must be even, not {text[key]}.")
        return {
            "query_latent_width": None if text.get("q_lora_rank") is None else integer(text, "q_lora_rank"),
            "num_draft_layers": integer(text, "num_nextn_predict_layers", least=0),
            "num_dense_layers": min(num_dense, num_layers),
            "max_position_embeddings": max_positions,
            "rope": read_rope(text, integer(text, "qk_rope_head_dim"), max_positions),
            "experts": ExpertConfig.read_experts(text) if num_dense < num_layers else None,
        }

    @property
    def kv_specs(self) -> tuple[KvSpec, ...]:
        """One `Latent` per layer, all with the same widths."""
        return (Latent(self.latent_width, self.rope_width),) * self.num_layers

    @property
    def score_scale(self) -> float:
        """The factor that scales the products of queries and keys."""
        return float((self.plain_width + self.rope_width) ** -0.5 * self.rope.score_factor)
