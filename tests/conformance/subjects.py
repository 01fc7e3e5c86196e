"""What the conformance suite runs over. A new family brings one entry (F7), a writer in tests/checkpoints and, where
transformers does not serve it, a second implementation in tests/references.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from references import Reference
from references.kimi_k3 import KimiK3
from references.kimi_k25 import KimiK25
from references.native import (
    CroppedTiles,
    Crops,
    GlmPatches,
    MergedPatches,
    PooledPatches,
    RasterPatches,
    Rows,
    SoftTokens,
    SquarePatches,
    Tiles,
)
from references.phi3_v import Phi3V

from saccade import models
from saccade.models.family import Layout, Pixels

Normalise = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """One release: its name in checkpoints.CHECKPOINTS, and what Saccade must be equal to.

    *normalise* is what an engine makes of our uint8 (and the parsed preprocessor_config.json), for references that
    know no uint8. *extremes* are sizes, (width, height), that the release accepts and others do not. *thinking* is
    the template's switch; *takes_tools* tells that it writes tools. *is_lossless* tells that a prompt's text comes back from its ids to the last space.
    """

    checkpoint: str
    reference: Callable[[Path], Reference]
    normalise: Normalise | None = None
    extremes: tuple[tuple[int, int], ...] = ()
    thinking: str | None = None
    takes_tools: bool = False
    is_lossless: bool = True


@dataclass(frozen=True)
class Sides:
    """One release: Saccade's halves, and what they must be equal to."""

    subject: Subject
    folder: Path
    preprocessor: Mapping[str, Any]
    family: str
    layout: Layout
    pixels: Pixels
    reference: Reference

    @classmethod
    def of(cls, subject: Subject, folder: Path) -> "Sides":
        """Load both sides from the checkpoint in *folder*."""
        files = ("config.json", "preprocessor_config.json")
        config, preprocessor = (json.loads((folder / name).read_text()) for name in files)
        family = models.family_of(config)
        layout = models.load_layout(family)(config, preprocessor)
        pixels = models.load_pixels(family)(layout.settings)
        return cls(subject, folder, preprocessor, family, layout, pixels, subject.reference(folder))


def merged_patches(patches: torch.Tensor, preprocessor: Mapping[str, Any]) -> torch.Tensor:
    """[patches, 3 * patch * patch] to the same with every frame doubled: (x - mean * 255) / (std * 255)."""
    patch, frames = preprocessor["patch_size"], preprocessor.get("temporal_patch_size", 1)
    doubled = patches.reshape(-1, 3, 1, patch, patch).expand(-1, -1, frames, -1, -1).float()
    return _affine(doubled, preprocessor, (3, 1, 1, 1)).reshape(len(patches), -1)


def crops(views: torch.Tensor, preprocessor: Mapping[str, Any]) -> torch.Tensor:
    """[..., 3, height, width], normalised the same way."""
    return _affine(views.float(), preprocessor, (3, 1, 1))


def pooled_patches(patches: torch.Tensor, preprocessor: Mapping[str, Any]) -> torch.Tensor:
    """[patches, values], in 0 to 1."""
    return patches.float() * preprocessor["rescale_factor"]


def _affine(pixels: torch.Tensor, preprocessor: Mapping[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    mean, std = (torch.tensor(preprocessor[key]).mul(255).reshape(shape) for key in ("image_mean", "image_std"))
    return pixels.sub(mean).div(std)


SUBJECTS = (
    Subject("qwen2_vl", MergedPatches, merged_patches),
    Subject("qwen2_5_vl", MergedPatches, merged_patches),
    Subject("qwen3_vl", MergedPatches, merged_patches, takes_tools=True),
    Subject("qwen3_vl_moe", MergedPatches, merged_patches, takes_tools=True),
    Subject("qwen3_5", MergedPatches, merged_patches, thinking="enable_thinking", takes_tools=True),
    Subject("qwen3_5_moe", MergedPatches, merged_patches, thinking="enable_thinking", takes_tools=True),
    Subject(
        "kimi_k25", KimiK25, extremes=((20_000, 1), (1, 20_000), (7_169, 15)), thinking="thinking", takes_tools=True
    ),
    Subject("kimi_k3", KimiK3, extremes=((20_000, 1), (1, 20_000), (7_169, 15)), thinking="thinking", takes_tools=True),
    Subject("llava", Crops, crops, is_lossless=False),
    Subject("llava_next", Crops, crops, extremes=((20_000, 1), (1, 20_000)), is_lossless=False),
    Subject("smolvlm", Tiles, crops, extremes=((20_000, 1), (1, 20_000))),
    Subject("smolvlm2", Tiles, crops, extremes=((20_000, 1), (1, 20_000))),
    *(
        Subject(
            name,
            GlmPatches,
            merged_patches,
            extremes=((200, 1), (1, 200), (5_399, 27), (5, 27)),
            thinking="enable_thinking",
            takes_tools=True,
        )
        for name in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
    ),
    Subject("internvl", CroppedTiles, crops, extremes=((20_000, 1), (1, 20_000))),
    Subject("internvl_moe", CroppedTiles, crops, extremes=((20_000, 1), (1, 20_000))),
    Subject("paddleocr_vl", RasterPatches, merged_patches, extremes=((200, 1), (1, 200), (5_399, 27), (5, 27))),
    *(
        Subject(
            name,
            reference,
            pooled_patches,
            extremes=((20_000, 1), (1, 20_000)),
            thinking="enable_thinking",
            takes_tools=True,
        )
        for name, reference in (
            ("gemma4", PooledPatches),
            ("gemma4_e2b", PooledPatches),
            ("gemma4_unified", SquarePatches),
        )
    ),
    Subject("gemma3", SoftTokens, crops, extremes=((20_000, 1), (1, 20_000))),
    *(
        Subject(name, Rows, merged_patches, extremes=((3_000, 2), (2, 3_000), (1_540, 1)))
        for name in ("mistral3", "ministral3")
    ),
    Subject("phi3_v", Phi3V, extremes=((1_000, 1), (1, 1_000)), is_lossless=False),
)
