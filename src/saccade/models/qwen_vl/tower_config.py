"""Reads and checks the config.json of Qwen's vision towers. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from saccade.errors import StartupError
from saccade.models.backbones.merging_config import MergingConfig
from saccade.models.backbones.model_config import integer
from saccade.models.qwen_vl import defaults


class Tower2Config(MergingConfig):
    """A tower in which `embed_dim` is the width and `hidden_size` is the width of the features."""

    defaults: ClassVar[Mapping[str, Any]] = defaults.TOWER2

    @classmethod
    def read_vision(cls, vision: Mapping[str, Any]) -> Self:
        keys = {**cls.defaults, **vision}
        width = integer(keys, "embed_dim")
        widths = {
            "hidden_size": width,
            "intermediate_size": width * integer(keys, "mlp_ratio"),
            "out_hidden_size": integer(keys, "hidden_size"),
        }
        return super().read_vision({**keys, **widths})


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(MergingConfig):
    """A tower whose blocks attend within windows of window * window merged patches, except for *full_blocks*.

    A frame group's position in a video is its time in seconds, times *tokens_per_second*.
    """

    defaults: ClassVar[Mapping[str, Any]] = defaults.WINDOWED

    window: int
    full_blocks: frozenset[int]
    tokens_per_second: Annotated[float, "tokens_per_second"]

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        merged = integer(vision, "spatial_merge_size") * integer(vision, "patch_size")
        window = integer(vision, "window_size", least=merged) // merged
        return {"window": window, "full_blocks": frozenset(_blocks(vision, "fullatt_block_indexes"))}


@dataclass(frozen=True, kw_only=True)
class Tower3Config(MergingConfig):
    """A tower with side * side learned positions. *deepstack_layers* are the blocks whose output is merged as well."""

    defaults: ClassVar[Mapping[str, Any]] = defaults.TOWER3

    side: int
    deepstack_layers: tuple[int, ...]

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        num_positions = integer(vision, "num_position_embeddings")
        side = round(num_positions**0.5)
        if side * side != num_positions:
            raise StartupError(f"config.json: `num_position_embeddings` must be a square, not {num_positions}.")
        return {"side": side, "deepstack_layers": _blocks(vision, "deepstack_visual_indexes")}

    @property
    def num_features(self) -> int:
        return 1 + len(self.deepstack_layers)


class FlatTowerConfig(Tower3Config):
    """A tower without deepstack. The releases leave the list of blocks empty, and the reference does not read it."""

    defaults: ClassVar[Mapping[str, Any]] = defaults.FLAT_TOWER

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        if vision["deepstack_visual_indexes"]:
            raise StartupError("config.json: `deepstack_visual_indexes` must be empty: this network has no deepstack.")
        return super().more({**vision, "deepstack_visual_indexes": []})


def _blocks(vision: Mapping[str, Any], key: str) -> tuple[int, ...]:
    blocks, depth = vision.get(key), integer(vision, "depth")
    if not isinstance(blocks, list) or not all(isinstance(block, int) and 0 <= block < depth for block in blocks):
        raise StartupError(
            f"config.json: `{key}` must list blocks of the vision tower (0 to {depth - 1}), not {blocks!r}; [] means "
            "none."
        )
    return tuple(blocks)
