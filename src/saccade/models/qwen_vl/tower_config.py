"""The config.json of the vision towers, checked. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, integer, values_of
from saccade.models.preprocessing.processor_config import CHANNELS

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The fields of all towers; *defaults* are values of keys that the releases leave out."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    norm_eps: ClassVar[float] = 1e-6

    depth: Annotated[int, "depth"]
    hidden_size: Annotated[int, "hidden_size"]
    intermediate_size: Annotated[int, "intermediate_size"]
    num_heads: Annotated[int, "num_heads"]
    out_hidden_size: Annotated[int, "out_hidden_size"]
    patch_size: Annotated[int, "patch_size"]
    merge_size: Annotated[int, "spatial_merge_size"]
    temporal_patch_size: Annotated[int, "temporal_patch_size"]
    activation: str

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> Self:
        """Read `vision_config`. Raises StartupError, naming the key."""
        vision = {**cls.defaults, **vision}
        activation = choice(vision, "hidden_act", ACTIVATIONS)
        config = cls(activation=activation, **values_of(cls, vision), **cls.more(vision))
        if config.hidden_size % (4 * config.num_heads):
            raise StartupError("config.json: the vision tower's width must be a multiple of 4 * `num_heads`.")
        if integer(vision, "in_channels") != CHANNELS:
            raise StartupError(f"config.json: `in_channels` must be {CHANNELS}, not {vision['in_channels']}.")
        return config

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a subclass that name no key. Raises StartupError, naming the key."""
        return {}

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_heads

    @property
    def kernel(self) -> tuple[int, ...]:
        """Channels, frames, height and width of a patch."""
        return CHANNELS, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def patch_values(self) -> int:
        """Values of one patch of one frame."""
        return CHANNELS * self.patch_size * self.patch_size

    @property
    def num_features(self) -> int:
        """Vectors of the text model's width that each token of an image has."""
        return 1


class Tower2Config(TowerConfig):
    """A tower whose `embed_dim` is its width, and `hidden_size` that of its features."""

    defaults: ClassVar[Mapping[str, Any]] = {"mlp_ratio": 4, "hidden_act": "quick_gelu", "in_channels": 3}
    """transformers 5.23, Qwen2VLVisionConfig."""

    @classmethod
    def read(cls, vision: Mapping[str, Any]) -> Self:
        keys = {**cls.defaults, **vision}
        width = integer(keys, "embed_dim")
        widths = {
            "hidden_size": width,
            "intermediate_size": width * integer(keys, "mlp_ratio"),
            "out_hidden_size": integer(keys, "hidden_size"),
        }
        return super().read({**keys, **widths})


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(TowerConfig):
    """A tower whose blocks attend within windows of window * window merged patches, except for *full_blocks*.

    Positions of a video's groups of frames are its seconds, times *tokens_per_second*.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "in_channels": 3, "tokens_per_second": 4}
    """transformers 5.23, Qwen2_5_VLVisionConfig."""

    window: int
    full_blocks: frozenset[int]
    tokens_per_second: Annotated[float, "tokens_per_second"]

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        merged = integer(vision, "spatial_merge_size") * integer(vision, "patch_size")
        window = integer(vision, "window_size", least=merged) // merged
        return {"window": window, "full_blocks": frozenset(_blocks(vision, "fullatt_block_indexes"))}


@dataclass(frozen=True, kw_only=True)
class Tower3Config(TowerConfig):
    """A tower with side * side learned positions. *deepstack_layers* are the blocks whose output is merged as well."""

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
    """A tower without deepstack. The releases list no blocks, and the reference does not read the key."""

    defaults: ClassVar[Mapping[str, Any]] = {"deepstack_visual_indexes": ()}

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
