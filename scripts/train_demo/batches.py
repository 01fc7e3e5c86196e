"""Batches: pictures to patches and targets, questions to token ids and positions."""

from dataclasses import dataclass

import numpy as np
import torch
from network import COLUMNS
from numpy.typing import NDArray
from pictures import CHARACTERS, COLOURS, Drawn
from PIL import Image
from tokenizer import token_id
from tokenizers import Tokenizer
from torch import Tensor

PATCH = 16
IGNORED = -100
"""The class that cross-entropy leaves out."""
SYSTEM = ("You are a careful reader.", "You are a helpful assistant.", "Answer briefly.")
NO_PICTURE = "I see no picture."


@dataclass(frozen=True)
class Targets:
    """What the direct loss asks for: (batch, tokens, columns) twice, and (batch,)."""

    characters: Tensor
    places: Tensor
    colours: Tensor


@dataclass(frozen=True)
class Prompt:
    """One question laid out for pictures of one grid."""

    ids: tuple[int, ...]
    start: int
    """Where the picture's tokens begin; -1 without a picture."""
    tokens: int
    """How many there are."""

    def places(self, length: int, grid: tuple[int, int]) -> NDArray[np.int64]:
        """M-RoPE positions (3, length): a picture's tokens share one time and count rows and columns from there."""
        if self.start < 0:
            return np.tile(np.arange(length), (3, 1))
        before = np.tile(np.arange(self.start), (3, 1))
        shown = np.indices((1, *grid)).reshape(3, -1) + self.start
        rest = length - self.start - self.tokens
        after = np.tile(np.arange(rest), (3, 1)) + self.start + max(grid)
        return np.concatenate([before, shown, after], 1)


def merged_grid(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of merged tokens for a picture of (width, height)."""
    return size[1] // (2 * PATCH), size[0] // (2 * PATCH)


def patches(images: list[Image.Image]) -> Tensor:
    """(batch, patches, 768): blocks of 2x2 patches row by row, in each patch channel by channel."""
    pixels = np.stack([np.asarray(image) for image in images])
    count, high, wide, _ = pixels.shape
    cut = pixels.reshape(count, high // 32, 2, PATCH, wide // 32, 2, PATCH, 3)
    rows: NDArray[np.uint8] = cut.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, -1, 3 * PATCH * PATCH)
    return torch.from_numpy(rows).float().div_(127.5).sub_(1.0)


def targets(drawn: list[Drawn]) -> Targets:
    """Which character covers each column of each merged token, which one in the row it is, and the colour."""
    rows, columns = merged_grid(drawn[0].image.size)
    characters = np.full((len(drawn), rows, columns * COLUMNS), len(CHARACTERS), dtype=np.int64)
    places = np.full_like(characters, IGNORED)
    step = 2 * PATCH / COLUMNS
    for number, item in enumerate(drawn):
        for place, (letter, (left, top, right, bottom)) in enumerate(zip(item.text, item.boxes, strict=True)):
            across = slice(round(left / step), max(round(left / step) + 1, round(right / step)))
            # A row of tokens that only grazes the text has too little of it to name the character.
            down = slice(int((top + 4) // 32), int((bottom - 4) // 32) + 1)
            characters[number, down, across] = CHARACTERS.index(letter)
            places[number, down, across] = place
    shape = (len(drawn), rows * columns, COLUMNS)
    names = tuple(COLOURS)
    return Targets(
        torch.from_numpy(characters).view(shape),
        torch.from_numpy(places).view(shape),
        torch.tensor([names.index(item.colour) for item in drawn]),
    )


def prompt(tokenizer: Tokenizer, question: str, tokens: int, system: str | None = None) -> Prompt:
    """The turns before the answer, with `tokens` places for the picture (0 for none)."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    pads = "<|image_pad|>" * tokens
    picture = f"<|vision_start|>{pads}<|vision_end|>" if tokens else ""
    text = f"{head}<|im_start|>user\n{picture}{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text).ids
    start = ids.index(token_id(tokenizer, "<|image_pad|>")) if tokens else -1
    return Prompt(tuple(ids), start, tokens)


@dataclass(frozen=True)
class Sequences:
    """Prompts with their answers, padded at the end to one length."""

    ids: Tensor
    labels: Tensor
    """The next token where it belongs to an answer, elsewhere `IGNORED`."""
    places: Tensor
    """(3, batch, length)"""
    spread: Tensor | None
    """(batch, length, tokens): one where a position holds a picture's token."""


def sequences(tokenizer: Tokenizer, asked: list[Prompt], answers: list[str], grid: tuple[int, int]) -> Sequences:
    """Join prompts and answers.  The length is a multiple of eight, so that few shapes occur."""
    said = [tokenizer.encode(f"{answer}<|im_end|>").ids for answer in answers]
    longest = max(len(one.ids) + len(answer) for one, answer in zip(asked, said, strict=True))
    shape = (len(asked), (longest + 7) // 8 * 8)
    ids = np.full(shape, token_id(tokenizer, "<|endoftext|>"), dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    places = np.empty((3, *shape), dtype=np.int64)
    spread = np.zeros((*shape, grid[0] * grid[1]), dtype=np.float32)
    for number, (one, answer) in enumerate(zip(asked, said, strict=True)):
        begin = len(one.ids)
        ids[number, : begin + len(answer)] = (*one.ids, *answer)
        labels[number, begin - 1 : begin - 1 + len(answer)] = answer
        places[:, number] = one.places(shape[1], grid)
        if one.start >= 0:
            spread[number, one.start : one.start + one.tokens] = np.eye(one.tokens, dtype=np.float32)
    shown = torch.from_numpy(spread) if asked[0].start >= 0 else None
    return Sequences(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(places), shown)
