"""Reads and checks MoonViT's config.json, for networks and specs. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from saccade.errors import StartupError
from saccade.models.backbones.model_config import check_equal, number, values_of
from saccade.models.backbones.vision_config import MergingVisionConfig

RELEASE: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "vt_num_hidden_layers",
        "hidden_size": "vt_hidden_size",
        "intermediate_size": "vt_intermediate_size",
        "num_attention_heads": "vt_num_attention_heads",
        "pos_emb_height": "init_pos_emb_height",
        "pos_emb_width": "init_pos_emb_width",
        "pos_emb_time": "init_pos_emb_time",
    }
)
"""The releases' keys by those of transformers, which reads only its own. A file may have both if they agree."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": 14,
        "pos_emb_height": 64,
        "pos_emb_width": 64,
        "pos_emb_time": 4,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
    }
)
"""The defaults of transformers' class of this tower, which are those of the releases' class."""

PROJECTOR_EPS: Mapping[str, Any] = MappingProxyType({"projection_layer_norm_eps": 1e-5})
"""The same of the class around it."""

FIXED: Mapping[str, Any] = MappingProxyType(
    {
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "video_attn_type": "spatial_temporal",
        "hidden_act": "gelu_pytorch_tanh",
    }
)
"""Settings with one supported value, which is also their default."""


@dataclass(frozen=True, kw_only=True)
class MoonVitConfig(MergingVisionConfig):
    """The vision part of config.json, checked.

    *table_rows* and *table_columns* give the size of the table of learned positions. A clip has at most *clip_frames*
    frames.
    """

    table_rows: Annotated[int, "pos_emb_height"]
    table_columns: Annotated[int, "pos_emb_width"]
    clip_frames: Annotated[int, "pos_emb_time"]
    projector_eps: float
    activation: str = "gelu_pytorch_tanh"
    norm_eps: float = 1e-5
    temporal_patch_size: int = 1

    @classmethod
    def read_vision(cls, config: Mapping[str, Any], vision: Mapping[str, Any], out_hidden_size: int) -> "MoonVitConfig":
        """Read `vision_config` and the *config* around it. *out_hidden_size* is the decoder's. Raises StartupError."""
        for key, other in RELEASE.items():
            if vision.get(key) != vision.get(other) and {key, other} <= vision.keys():
                raise StartupError(
                    f"config.json: `{key}` of the vision tower is {vision[key]!r}, but `{other}` is {vision[other]!r}."
                )
        vision = {**DEFAULTS, **vision}
        check_equal(vision, FIXED)
        tower = cls(
            **values_of(cls, vision, RELEASE),
            merge_size=_merge_size(vision),
            projector_eps=_projector_eps(config, vision),
            out_hidden_size=out_hidden_size,
        )
        tower.check_rotation("its heads")
        widths = {
            "mm_hidden_size": (vision, tower.hidden_size),
            "text_hidden_size": (vision, out_hidden_size),
            "projection_hidden_size": (config, tower.hidden_size),
        }
        for key, (holder, width) in widths.items():
            if holder.get(key, width) != width:
                raise StartupError(f"config.json: `{key}` is {holder[key]!r}, but the network needs {width}.")
        return tower


def _merge_size(vision: Mapping[str, Any]) -> int:
    match vision.get("merge_kernel_size"):
        case [int(rows), int(columns)] if rows == columns and rows > 0:
            return rows
        case given:
            raise StartupError(f"config.json: `merge_kernel_size` must be two equal whole numbers, not {given!r}.")


def _projector_eps(config: Mapping[str, Any], vision: Mapping[str, Any]) -> float:
    if "projector_ln_eps" in vision:
        return number(vision, "projector_ln_eps")
    return number({**PROJECTOR_EPS, **config}, "projection_layer_norm_eps")
