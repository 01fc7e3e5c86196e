"""transformers' own image processors (torchvision backend) and tokenizers."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from references import Chat, Seen, render_template


def load(folder: Path, kind: str) -> Any:
    """Return what transformers makes of *folder*: *kind* is one of its Auto classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        import transformers

        return getattr(transformers, kind).from_pretrained(folder, trust_remote_code=False)


def _template(folder: Path) -> str:
    """The processors look into these files, in this order; a tokenizer alone does not."""
    jinja, named = folder / "chat_template.jinja", folder / "chat_template.json"
    return jinja.read_text() if jinja.exists() else str(json.loads(named.read_text())["chat_template"])


class _Text:
    """Template and tokenizer. The placeholder is repeated in the text, as the processors do it."""

    placeholder: str

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load(folder, "AutoTokenizer")
        self.template = _template(folder)

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        return render_template(self.template, chat, add_generation_prompt, switches)

    def token_ids(self, prompt: str, seen: Sequence[Seen]) -> list[int]:
        pieces = prompt.split(self.placeholder)
        repeated = (one.text or self.placeholder * one.num_tokens for one in seen)
        text = pieces[0] + "".join(run + piece for run, piece in zip(repeated, pieces[1:], strict=True))
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids


class MergedPatches(_Text):
    """The Qwen towers: patches in merged blocks, frames doubled."""

    placeholder = "<|image_pad|>"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processor = load(folder, "AutoImageProcessor")

    def see(self, image: Image.Image) -> Seen:
        made = self.processor(images=[image], return_tensors="pt")
        grid = tuple(made["image_grid_thw"][0].tolist())
        return Seen(grid[0] * grid[1] * grid[2] // self.processor.merge_size**2, made["pixel_values"], grid)


class GlmPatches(MergedPatches):
    """GLM-4.xV: the same patches, with other tokens."""

    placeholder = "<|image|>"


class RasterPatches(MergedPatches):
    """PaddleOCR-VL: patches in raster order, here put into merged blocks. Content is a list of parts."""

    placeholder = "<|IMAGE_PLACEHOLDER|>"

    def see(self, image: Image.Image) -> Seen:
        seen = super().see(image)
        assert seen.grid is not None
        assert seen.pixel_values is not None
        merge, (_, rows, columns) = self.processor.merge_size, seen.grid
        blocks = seen.pixel_values.flatten(1).view(rows // merge, merge, columns // merge, merge, -1)
        return replace(seen, pixel_values=blocks.transpose(1, 2).flatten(0, 3))

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        return super().render(
            [{**turn, "content": _parts(turn["content"])} for turn in chat], add_generation_prompt, switches
        )


class Crops(_Text):
    """LLaVA-1.5 and LLaVA-NeXT: whole crops, and a processor that counts tokens. Content is a list of parts."""

    placeholder = "<image>"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processor = load(folder, "AutoProcessor")

    def see(self, image: Image.Image) -> Seen:
        made = self.processor.image_processor(images=[image], return_tensors="pt")
        counted = self.processor._get_num_multimodal_tokens([(image.height, image.width)])
        return Seen(counted["num_image_tokens"][0], made["pixel_values"][0])

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        return super().render(
            [{**turn, "content": _parts(turn["content"])} for turn in chat], add_generation_prompt, switches
        )


class Rows(_Text):
    """Mistral Small 3.1: whole images with a token after each row, here in merged blocks. The template writes the BOS."""

    placeholder = "[IMG]"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processor = load(folder, "AutoProcessor")

    def see(self, image: Image.Image) -> Seen:
        made = self.processor(text=self.placeholder, images=[image], return_tensors="pt")
        text = self.processor.replace_image_token(made, 0)
        merge, patch = self.processor.spatial_merge_size, self.processor.patch_size
        height, width = (side // (patch * merge) for side in made["image_sizes"][0].tolist())
        blocks = made["pixel_values"][0].view(3, height, merge, patch, width, merge, patch)
        patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).flatten(4).flatten(0, 3)
        return Seen(text.count(self.placeholder), patches, (1, height * merge, width * merge), text=text)

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        tokens = {"bos_token": self.tokenizer.bos_token, "eos_token": self.tokenizer.eos_token}
        return super().render(chat, add_generation_prompt, {**switches, **tokens})

    def token_ids(self, prompt: str, seen: Sequence[Seen]) -> list[int]:
        first, *others = super().token_ids(prompt, seen)
        assert others[0] == first, "the tokenizer's own BOS, which transformers leaves out of a chat that has one"
        return others


class Tiles(_Text):
    """Idefics3 and SmolVLM: tiles with text between them. Content is a list of parts.

    The prompt is that of Idefics3's processor for both; SmolVLM's, which writes the same for images, needs a package
    for videos.
    """

    placeholder = "<image>"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from transformers import Idefics3Processor

        count = json.loads((folder / "processor_config.json").read_text())["image_seq_len"]
        self.processor = Idefics3Processor(load(folder, "AutoImageProcessor"), self.tokenizer, image_seq_len=count)

    def see(self, image: Image.Image) -> Seen:
        made = self.processor.image_processor(images=[image], return_row_col_info=True, return_tensors="pt")
        text = self.processor.replace_image_token({"rows": made["rows"], "cols": made["cols"]}, 0)
        return Seen(text.count(self.placeholder), made["pixel_values"][0], text=text)

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        return super().render(
            [{**turn, "content": _parts(turn["content"])} for turn in chat], add_generation_prompt, switches
        )


class CroppedTiles(_Text):
    """InternVL: tiles and the whole image in one run of placeholders. Content may be a string."""

    placeholder = "<IMG_CONTEXT>"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processor = load(folder, "AutoImageProcessor")
        self.view_tokens = json.loads((folder / "processor_config.json").read_text())["image_seq_length"]

    def see(self, image: Image.Image) -> Seen:
        made = self.processor(images=[image], crop_to_patches=True, return_tensors="pt")
        count = len(made["pixel_values"]) * self.view_tokens
        return Seen(count, made["pixel_values"], text=f"<img>{self.placeholder * count}</img>")


class PooledPatches(_Text):
    """Gemma 4: patches pixel by pixel, padded to the budget, here in merged blocks and channel by channel as ours.

    The template writes the first token; an image's placeholders stand between marks.
    """

    placeholder = "<|image|>"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processor = load(folder, "AutoImageProcessor")

    def see(self, image: Image.Image) -> Seen:
        made = self.processor(images=[image], return_tensors="pt")
        places = made["image_position_ids"][0]
        columns, rows = (places.amax(0) + 1).tolist()
        merge, patch = self.processor.pooling_kernel_size, self.processor.patch_size
        shape = (rows // merge, merge, columns // merge, merge, patch, patch, 3)
        blocks = made["pixel_values"][0, : rows * columns].view(shape).permute(0, 2, 1, 3, 6, 4, 5)
        count = int(made["num_soft_tokens_per_image"][0])
        text = f"<|image>{self.placeholder * count}<image|>"
        return Seen(count, blocks.reshape(rows * columns, -1), (1, rows, columns), text=text)

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        return super().render(chat, add_generation_prompt, {**switches, "bos_token": self.tokenizer.bos_token})


class SquarePatches(PooledPatches):
    """Gemma 4 without a tower: squares of patches, pixel by pixel; here patch by patch, channel by channel."""

    def see(self, image: Image.Image) -> Seen:
        made = self.processor(images=[image], return_tensors="pt")
        columns, rows = (made["image_position_ids"][0].amax(0) + 1).tolist()
        merge, patch = self.processor.pooling_kernel_size, self.processor.patch_size
        count = int(made["num_soft_tokens_per_image"][0])
        squares = made["pixel_values"][0, :count].view(count, merge, patch, merge, patch, 3)
        patches = squares.permute(0, 1, 3, 5, 2, 4).reshape(count * merge**2, -1)
        text = f"<|image>{self.placeholder * count}<image|>"
        return Seen(count, patches, (1, rows * merge, columns * merge), text=text)


class SoftTokens(Rows):
    """Gemma 3: whole images as squares, between line breaks and marks. The template writes the first token, too."""

    placeholder = "<start_of_image>"

    def see(self, image: Image.Image) -> Seen:
        made = self.processor.image_processor(images=[image], return_tensors="pt", **self.processor.images_kwargs)
        text = self.processor.full_image_sequence
        return Seen(text.count(self.tokenizer.image_token), made["pixel_values"], text=text)


def _parts(content: Any) -> Any:
    """These templates read lists only; a string is a list of one text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
