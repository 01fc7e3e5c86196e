"""Phi-3-vision: the release's processor (image_processing_phi3_v.py) and tokenisation (processing_phi3_v.py), from
their description: Pillow, numpy and the Llama tokenizer of transformers; nothing of Saccade.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from references import Chat, Seen, render_template
from references.native import load

SIDE, PATCH = 336, 14
TAG = re.compile(r"<\|image_(\d+)\|>")


class Phi3V:
    """The reference for one checkpoint's folder. Images end where the release would normalise and cut them."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "preprocessor_config.json").read_text())
        self.tokenizer = load(folder, "AutoTokenizer")
        self.template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        # The release marks the k-th image by the id -k; this is the token that stands for all of them elsewhere.
        self.placeholder_token_id: int = self.tokenizer.convert_tokens_to_ids("<|image|>")

    def see(self, image: Image.Image) -> Seen:
        padded = _on_white(image.convert("RGB"), self.settings["num_crops"])
        rows, columns = padded.height // SIDE, padded.width // SIDE
        num_tokens = (rows * columns + 1) * self.settings["num_img_tokens"] + 1 + (rows + 1) * 12
        pixels = np.asarray(padded).transpose(2, 0, 1)
        return Seen(num_tokens, grid=(1, padded.height // PATCH, padded.width // PATCH), pixels=pixels)

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        numbers = iter(range(1, 1000))
        turns = [{**turn, "content": _as_string(turn["content"], numbers)} for turn in chat]
        return render_template(self.template, turns, add_generation_prompt, switches)

    def token_ids(self, prompt: str, seen: Sequence[Seen]) -> list[int]:
        texts, tags = TAG.split(prompt)[::2], TAG.findall(prompt)
        ids: list[int] = list(self.tokenizer(texts[0])["input_ids"])
        for tag, text in zip(tags, texts[1:], strict=True):
            ids += [self.placeholder_token_id] * seen[int(tag) - 1].num_tokens
            ids += self.tokenizer(text)["input_ids"]
        return ids


def _on_white(image: Image.Image, num_crops: int) -> Image.Image:
    """Scale to whole crops in width (of the image laid on its long side), fill the height up with white."""
    upright = image.width < image.height
    lying = image.transpose(Image.Transpose.TRANSPOSE) if upright else image
    ratio = lying.width / lying.height
    scale = max(scale for scale in range(1, num_crops + 1) if scale * math.ceil(scale / ratio) <= num_crops)
    width = scale * SIDE
    height = int(width / ratio)
    filled = math.ceil(height / SIDE) * SIDE
    canvas = Image.new("RGB", (width, filled), (255, 255, 255))
    canvas.paste(lying.resize((width, height), Image.Resampling.BILINEAR), (0, (filled - height) // 2))
    return canvas.transpose(Image.Transpose.TRANSPOSE) if upright else canvas


def _as_string(content: Any, numbers: Any) -> str:
    """The template reads strings only: images are tags, numbered through the whole chat, each on a line of its own."""
    if isinstance(content, str):
        return content
    return "".join(f"<|image_{next(numbers)}|>\n" if part["type"] == "image" else part["text"] for part in content)
