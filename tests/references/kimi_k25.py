"""Kimi-K2.5: the release's processor (kimi_k25_vision_processing.py, media_utils.py) and tokenizer
(tokenization_kimi.py), from their description: Pillow, numpy, tiktoken; nothing of Saccade.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from checkpoints.kimi_k25 import NUM_RESERVED, PATTERN
from PIL import Image
from tiktoken.load import load_tiktoken_bpe

from references import Chat, Seen, render_template

PLACEHOLDER = "<|media_pad|>"
LONGEST_TEXT = 400_000
LONGEST_RUN = 25_000


class Watched(NamedTuple):
    """A video: the indices of its frames, the grid of each chunk, the text for it, and its uint8 patches."""

    frames: list[int]
    grids: list[tuple[int, int, int]]
    text: str
    pixels: np.ndarray


class KimiK25:
    """The reference for one checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        self.media = json.loads((folder / "preprocessor_config.json").read_text())["media_proc_cfg"]
        self.template = (folder / "chat_template.jinja").read_text()
        ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
        entries = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        names = {int(number): entry["content"] for number, entry in entries.items()}
        reserved = range(len(ranks), len(ranks) + NUM_RESERVED)
        special = {names.get(number, f"<|reserved_token_{number}|>"): number for number in reserved}
        self.encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def see(self, image: Image.Image) -> Seen:
        patch, merge = self.media["patch_size"], self.media["merge_kernel_size"]
        small = _shrink(image.convert("RGB"), self.media)
        width, height = (-(-side // (patch * merge)) * patch * merge for side in small.size)
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[: small.height, : small.width] = np.asarray(small)
        pixels = _patches(canvas, patch)
        values = (pixels / 255.0).astype(np.float32)
        values -= np.array(self.media["image_mean"])[:, None, None]
        values *= 1.0 / np.array(self.media["image_std"])[:, None, None]
        num_tokens = (height // (patch * merge)) * (width // (patch * merge))
        return Seen(num_tokens, torch.from_numpy(values), (1, height // patch, width // patch), pixels)

    def watch(self, frames: Sequence[Image.Image], fps: float) -> Watched:
        """What the release's processor makes of all *frames* of a video: chunks of four, each behind its time."""
        patch, merge = self.media["patch_size"], self.media["merge_kernel_size"]
        count = max(round(len(frames) * min(self.media["sample_fps"], fps) / fps), 1)
        chosen = np.linspace(0, len(frames) - 1, count).round().astype(int).tolist()
        limits = {**self.media, "in_patch_limit": self.media["in_patch_limit_each_frame"]}
        pixels, grids, text = [], [], ""
        for start in range(0, count, 4):
            chunk = [_shrink(frames[index].convert("RGB"), limits) for index in chosen[start : start + 4]]
            width, height = (-(-side // (patch * merge)) * patch * merge for side in chunk[0].size)
            for small in chunk:
                canvas = np.zeros((height, width, 3), np.uint8)
                canvas[: small.height, : small.width] = np.asarray(small)
                pixels.append(_patches(canvas, patch))
            grids.append((len(chunk), height // patch, width // patch))
            begun = datetime.fromtimestamp(chosen[start] / fps, tz=UTC)
            time = begun.strftime("%H:%M:%S") + f".{int(chosen[start] / fps % 1 * 1000):03d}"
            pads = PLACEHOLDER * ((height // (patch * merge)) * (width // (patch * merge)))
            text += f"{time}<|media_begin|>video<|media_content|>{pads}<|media_end|>"
        return Watched(chosen, grids, text, np.concatenate(pixels))

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        return render_template(self.template, chat, add_generation_prompt, switches)

    def token_ids(self, prompt: str, seen: Sequence[Seen]) -> list[int]:
        pieces = prompt.split(PLACEHOLDER)
        repeated = (PLACEHOLDER * one.num_tokens for one in seen)
        text = pieces[0] + "".join(run + piece for run, piece in zip(repeated, pieces[1:], strict=True))
        stretches = (
            part for start in range(0, len(text), LONGEST_TEXT) for part in _cut(text[start : start + LONGEST_TEXT])
        )
        return [number for part in stretches for number in self.encoding.encode(part, allowed_special="all")]


def _shrink(image: Image.Image, media: Mapping[str, Any]) -> Image.Image:
    """Bicubic, never larger: bounded by the patches in all and by those along one side."""
    patch, longest = media["patch_size"], media["patch_limit_on_one_side"] * media["patch_size"]
    patches = max(1, image.width // patch) * max(1, image.height // patch)
    scale = min(1.0, math.sqrt(media["in_patch_limit"] / patches), longest / image.width, longest / image.height)
    width, height = (min(max(1, int(side * scale)), longest) for side in image.size)
    across = image.resize((width, image.height), Image.Resampling.BICUBIC)
    return across.resize((width, height), Image.Resampling.BICUBIC)


def _patches(canvas: Any, patch: int) -> Any:
    """[height, width, 3] to [rows * columns, 3, patch, patch], row by row."""
    height, width, channels = canvas.shape
    cut = canvas.reshape(height // patch, patch, width // patch, patch, channels)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(-1, channels, patch, patch)


def _cut(text: str) -> Iterator[str]:
    """Cut where a run of spaces, or of anything else, grows over LONGEST_RUN."""
    start, run = 0, 0
    for position, character in enumerate(text):
        same = position > 0 and character.isspace() == text[position - 1].isspace()
        run = run + 1 if same else 1
        if run > LONGEST_RUN:
            yield text[start:position]
            start, run = position, 1
    yield text[start:]
