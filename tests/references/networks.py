"""Oracles: the releases' networks by transformers in float32, fed with the tokens and uint8 pixels that an engine gets.

A new family adds its class to ORACLES and the writer of its tiny checkpoint to checkpoints.NETWORKS.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from references.phi3_v_network import Phi3VOracle
from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest


class Oracle(Protocol):
    """The reference for one checkpoint. Two logits closer than *atol* are equal."""

    atol: float
    placeholder_token_ids: tuple[int, ...]

    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        """Return the logits [len(token_ids), vocab] from which each of *token_ids*, the answer, was chosen."""


def image_text_model(folder: Path) -> Any:
    """Return transformers' model of *folder*, float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


class TextOracle:
    """A network that reads text only."""

    atol = 1e-4
    placeholder_token_ids: tuple[int, ...] = ()

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([asked.token_ids + token_ids[:-1]])
        return self.model(ids).logits[0, len(asked.token_ids) - 1 :].float()


class QwenOracle:
    """A network with patches of frames that are doubled, and three axes of positions."""

    atol = 1e-4

    def __init__(self, folder: Path) -> None:
        self.model = image_text_model(folder)
        self.placeholder = self.model.config.image_token_id
        self.video_placeholder = self.model.config.video_token_id
        self.placeholder_token_ids: tuple[int, ...] = (self.placeholder, self.video_placeholder)
        self._preprocessor = json.loads((folder / "preprocessor_config.json").read_text())

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([asked.token_ids + token_ids[:-1]])
        kinds = (ids == self.placeholder).int() + 2 * (ids == self.video_placeholder).int()
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
        for modality, pixels, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if items := [item for item in asked.media if item.modality == modality]:
                inputs[pixels] = torch.cat([self.pixel_values(item) for item in items])
                inputs[grid] = torch.tensor([item.grid for item in items])
        if seconds := [item.seconds_per_group for item in asked.media if item.modality == "video"]:
            inputs |= self.times(seconds)
        self.model.model.rope_deltas = None
        return self.model(**inputs).logits[0, len(asked.token_ids) - 1 :].float()

    def times(self, seconds_per_group: Sequence[float | None]) -> dict[str, torch.Tensor]:
        """Return what the network gets of videos' times: nothing."""
        return {}

    def images(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """Return the patches and grids of images."""
        patches = torch.cat([self.pixel_values(item) for item in items])
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([item.grid for item in items])}

    def pixel_values(self, item: MediaItem) -> torch.Tensor:
        """Return normalised patches [P, 3 * frames * patch * patch]."""
        patch, frames = self._preprocessor["patch_size"], self._preprocessor["temporal_patch_size"]
        given = 1 if item.modality == "image" else frames
        patches = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(-1, 3, given, patch, patch)
        mean, std = (
            torch.tensor(self._preprocessor[key]).view(3, 1, 1, 1) * 255 for key in ("image_mean", "image_std")
        )
        return ((patches.expand(-1, -1, frames, -1, -1).float() - mean) / std).flatten(1)


class TimedOracle(QwenOracle):
    """A network whose positions of videos are seconds."""

    def times(self, seconds_per_group: Sequence[float | None]) -> dict[str, torch.Tensor]:
        return {"second_per_grid_ts": torch.tensor(seconds_per_group)}


class RecurrentOracle(QwenOracle):
    """A network with recurrent layers, whose rounding errors add up over the sequence.

    On one processor the reference itself is 1.2e-3 from its logits in float64 after a video, and ours 4e-5.
    """

    atol = 2e-3


class GlmOracle(QwenOracle):
    """A network that fills images and the frames of videos by one placeholder, so that transformers mixes neither.

    The features are put into their places here. Each pair of frames is an item of its own for the positions.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.placeholder_token_ids = (self.placeholder,)

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([asked.token_ids + token_ids[:-1]])
        model = self.model.model
        embedded, kinds = model.get_input_embeddings()(ids), torch.zeros_like(ids)
        grids: dict[str, list[tuple[int, ...]]] = {"image": [], "video": []}
        for item in asked.media:
            places = [place for span in item.spans for place in range(span.start, span.start + span.length)]
            embed = model.get_image_features if item.modality == "image" else model.get_video_features
            features = embed(self.pixel_values(item), torch.tensor([item.grid])).pooler_output
            embedded[0, places] = torch.cat(tuple(features))
            kinds[0, places] = 1 if item.modality == "image" else 2
            grids[item.modality].append(item.grid)
        image, video = (torch.tensor(grids[kind]) if grids[kind] else None for kind in ("image", "video"))
        positions, _ = model.get_rope_index(
            input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=image, video_grid_thw=video
        )
        answer = self.model(inputs_embeds=embedded, position_ids=positions)
        return answer.logits[0, len(asked.token_ids) - 1 :].float()


class RasterOracle(QwenOracle):
    """A network with patches in raster order, which the wire has in merged blocks. It takes no videos."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.placeholder_token_ids = (self.placeholder,)

    def pixel_values(self, item: MediaItem) -> torch.Tensor:
        """Return normalised patches [P, 3, patch, patch]."""
        merge, (_, rows, columns) = self._preprocessor["merge_size"], item.grid
        blocks = super().pixel_values(item).view(rows // merge, columns // merge, merge, merge, -1)
        patch = self._preprocessor["patch_size"]
        return blocks.transpose(1, 2).reshape(rows * columns, 3, patch, patch)


class KimiOracle:
    """A network with whole patches in raster order, normalised as the release does."""

    atol = 1e-4

    def __init__(self, folder: Path) -> None:
        self.model = image_text_model(folder)
        self.placeholder_token_ids: tuple[int, ...] = (self.model.config.image_token_id,)

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([asked.token_ids + token_ids[:-1]])}
        if any(item.modality == "video" for item in asked.media):
            inputs = {"inputs_embeds": self._embedded(inputs["input_ids"], asked.media)}
        elif asked.media:
            pixel_values = torch.cat([self.pixel_values(item) for item in asked.media])
            inputs["pixel_values"] = pixel_values.to(self.model.dtype)  # transformers does not
            inputs["image_grid_thw"] = torch.tensor([item.grid for item in asked.media])
        return self.model(**inputs).logits[0, len(asked.token_ids) - 1 :].float()

    def _embedded(self, ids: torch.Tensor, media: Sequence[MediaItem]) -> torch.Tensor:
        """Return the embeddings of *ids* with the features of *media*."""
        embedded = self.model.get_input_embeddings()(ids)
        for item in media:
            places = [place for span in item.spans for place in range(span.start, span.start + span.length)]
            embedded[0, places] = self.features(item)
        return embedded

    def features(self, item: MediaItem) -> torch.Tensor:
        """Return the features of an image or video, clip after clip.

        transformers 5.23 encodes no two clips at once of which one has more frames, and counts the tokens of each frame.
        """
        parts, (_, rows, columns) = [], item.grid
        for clip in self.pixel_values(item).split(4 * rows * columns):
            grid = torch.tensor([[len(clip) // (rows * columns), rows, columns]])
            pooled = self.model.model.vision_tower(clip.to(self.model.dtype), grid_thw=grid).pooler_output
            parts.append(self.model.model.mm_projector(pooled).squeeze(1))
        return torch.cat(parts)

    @staticmethod
    def pixel_values(item: MediaItem) -> torch.Tensor:
        """Return normalised patches [P, 3, patch, patch]."""
        patches = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(item.pixel_shape)
        return ((patches.double() / 255.0).float() - 0.5) / 0.5


class LlavaOracle:
    """LLaVA-1.5 and LLaVA-NeXT: square views, for NeXT with the images' original sizes."""

    atol = 1e-4

    def __init__(self, folder: Path) -> None:
        self.model = image_text_model(folder)
        self.placeholder_token_ids: tuple[int, ...] = (self.model.config.image_token_id,)
        self._preprocessor = json.loads((folder / "preprocessor_config.json").read_text())

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([asked.token_ids + token_ids[:-1]])}
        if asked.media:
            inputs |= self.images(asked.media)
        return self.model(**inputs).logits[0, len(asked.token_ids) - 1 :].float()

    def images(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """Return normalised views [V, 3, S, S], or [images, most views, 3, S, S] and original sizes [images, 2]."""
        views = [self._normalised(item) for item in items]
        if items[0].original_size is None:
            return {"pixel_values": torch.stack(views)}
        sizes = torch.tensor([item.original_size for item in items])
        return {"pixel_values": torch.nn.utils.rnn.pad_sequence(views, batch_first=True), "image_sizes": sizes}

    def _normalised(self, item: MediaItem, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        pixels = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(shape or item.pixel_shape)
        mean, std = (torch.tensor(self._preprocessor[key]).view(3, 1, 1) * 255 for key in ("image_mean", "image_std"))
        return (pixels.float() - mean) / std


class TilesOracle(LlavaOracle):
    """Idefics3 and SmolVLM: square views, all of one prompt in one tensor."""

    def images(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """Return normalised views [1, V, 3, S, S]."""
        return {"pixel_values": torch.cat([self._normalised(item) for item in items]).unsqueeze(0)}


class CroppedOracle(LlavaOracle):
    """InternVL: square views, all of one prompt in one tensor."""

    def images(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """Return normalised views [V, 3, S, S]."""
        return {"pixel_values": torch.cat([self._normalised(item) for item in items])}


class RowsOracle(LlavaOracle):
    """Mistral Small 3.1: whole images, padded to one size, with their own sizes."""

    def images(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """Return normalised images [N, 3, height, width] and their sizes [N, 2]."""
        images = [self._image(item) for item in items]
        sizes = torch.tensor([image.shape[1:] for image in images])
        height, width = sizes.amax(0).tolist()
        padded = torch.zeros(len(images), 3, height, width)
        for place, image in zip(padded, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        return {"pixel_values": padded, "image_sizes": sizes}

    def _image(self, item: MediaItem) -> torch.Tensor:
        """Return a normalised image [3, height, width]."""
        merge, patch = self.model.config.spatial_merge_size, self._preprocessor["patch_size"]
        _, rows, columns = item.grid
        patches = self._normalised(item, (rows * columns, 3, patch, patch))
        blocks = patches.view(rows // merge, columns // merge, merge, merge, 3, patch, patch)
        return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)


class GemmaOracle:
    """Gemma 4: patches pixel by pixel, by rows, with their places; images and frames padded to one length."""

    atol = 1e-4

    def __init__(self, folder: Path) -> None:
        self.model = image_text_model(folder)
        config = self.model.config
        self.placeholder_token_ids: tuple[int, ...] = (config.image_token_id, config.video_token_id)
        self._patch, self._merge = config.vision_config.patch_size, config.vision_config.pooling_kernel_size

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([asked.token_ids + token_ids[:-1]])
        kinds = torch.zeros_like(ids)
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
        for kind, (modality, pixels) in enumerate((("image", "pixel_values"), ("video", "pixel_values_videos")), 1):
            kinds[ids == self.placeholder_token_ids[kind - 1]] = kind
            items = [item for item in asked.media if item.modality == modality]
            if not items:
                continue
            patches, places = zip(*(frame for item in items for frame in self.frames(item)), strict=True)
            pad = torch.nn.utils.rnn.pad_sequence
            inputs[pixels] = pad(list(patches), batch_first=True)
            inputs[f"{modality}_position_ids"] = pad(list(places), batch_first=True, padding_value=-1)
            if modality == "video":
                inputs["num_frames_per_video"] = torch.tensor([item.grid[0] for item in items])
        return self.model(**inputs, **self.masks(ids, kinds)).logits[0, len(asked.token_ids) - 1 :].float()

    def masks(self, ids: torch.Tensor, kinds: torch.Tensor) -> dict[str, Any]:
        """Return what the network is told of masks: nothing."""
        return {}

    def frames(self, item: MediaItem) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each frame its patches [P, patch * patch * 3] in 0 to 1, and their columns and rows [P, 2]."""
        count, rows, columns = item.grid
        merge, patch = self._merge, self._patch
        shape = (count, rows // merge, columns // merge, merge, merge, 3, patch, patch)
        blocks = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(shape)
        patches = blocks.permute(0, 1, 3, 2, 4, 6, 7, 5).reshape(count, rows * columns, -1).float() / 255
        grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        places = torch.stack(grid, -1).reshape(-1, 2)
        return [(frame, places) for frame in patches]


class SoftTokensOracle:
    """Gemma 3: images as squares, whose tokens see each other."""

    atol = 1e-4

    def __init__(self, folder: Path) -> None:
        self.model = image_text_model(folder)
        self.placeholder_token_ids: tuple[int, ...] = (self.model.config.image_token_id,)

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([asked.token_ids + token_ids[:-1]])
        inputs: dict[str, Any] = {"input_ids": ids, "token_type_ids": (ids == self.placeholder_token_ids[0]).int()}
        if asked.media:
            inputs |= self.images(asked.media)
        return self.model(**inputs).logits[0, len(asked.token_ids) - 1 :].float()

    def images(self, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
        """Return normalised images [images, 3, S, S]."""
        views = [torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8) for item in items]
        shaped = torch.cat([view.view(item.pixel_shape) for view, item in zip(views, items, strict=True)])
        return {"pixel_values": (shaped.float() - 127.5) / 127.5}


class UnifiedOracle(GemmaOracle):
    """The same without a tower: the values of a token, pixel by pixel, and its place.

    By itself, transformers 5.23 lets tokens of an image see each other in all layers, and over the window; the masks
    that it makes for generation with a static cache are those of the release.
    """

    def masks(self, ids: torch.Tensor, kinds: torch.Tensor) -> dict[str, Any]:
        """Return the masks of both kinds of layers."""
        embedded = torch.zeros(*ids.shape, 1)
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        made = self.model.create_masks_for_generate(
            self.model.config, embedded, None, None, places, mm_token_type_ids=kinds
        )
        return {"attention_mask": made}

    def frames(self, item: MediaItem) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each frame its tokens [U, side * side * 3] in 0 to 1, and their columns and rows [U, 2]."""
        from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge

        merged = []
        for patches, places in super().frames(item):
            tokens, centres = patches_merge(patches[None], places[None], len(patches) // self._merge**2)
            merged.append((tokens[0], centres[0]))
        return merged


ORACLES: Mapping[str, type[Oracle]] = {
    "qwen2_vl": QwenOracle,
    "qwen2_5_vl": TimedOracle,
    "llava": LlavaOracle,
    "llava_next": LlavaOracle,
    "qwen3_vl": QwenOracle,
    "kimi_k25": KimiOracle,
    "qwen3_vl_moe": QwenOracle,
    "qwen3_5": RecurrentOracle,
    "qwen3_5_moe": RecurrentOracle,
    "phi3_v": Phi3VOracle,
    "paddleocr_vl": RasterOracle,
    "mistral3": RowsOracle,
    "ministral3": RowsOracle,
    "gemma3": SoftTokensOracle,
    "internvl": CroppedOracle,
    "internvl_moe": CroppedOracle,
    "glm4v": GlmOracle,
    "glm4v_moe": GlmOracle,
    "glm46v": GlmOracle,
    "glm_ocr": GlmOracle,
    "smolvlm": TilesOracle,
    "smolvlm2": TilesOracle,
    "gemma4": GemmaOracle,
    "gemma4_e2b": GemmaOracle,
    "gemma4_unified": UnifiedOracle,
}
"""The oracle of each checkpoint in checkpoints.NETWORKS, by its name there."""
