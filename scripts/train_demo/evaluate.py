"""Measure a model folder with transformers alone: greedy answers in float32, compared exactly."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import batches
import torch
import transformers
from network import doubled
from pictures import KEPT_OUT_FONT, KINDS, Drawn, Style, available_fonts, draw, held_out
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

GROUP = 50
"""Pictures answered at once."""
TEXT_KINDS = ("text", "colour")
OTHER_SIZES = ((160, 64), (192, 64), (128, 96), (96, 96))


@dataclass(frozen=True)
class Score:
    """How many answers were exactly right."""

    right: int
    asked: int

    def written(self) -> dict[str, float]:
        """For the result file."""
        return {"right": self.right, "asked": self.asked, "exact": round(self.right / max(1, self.asked), 4)}


class Examiner:
    """A model folder, loaded as anybody would load it."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def answer(self, questions: list[str], images: list[Any] | None) -> list[str]:
        """Greedy answers; pictures must be of one size, None asks without."""
        said = [""] * len(questions)
        for question in sorted(set(questions)):
            chosen = [number for number, asked in enumerate(questions) if asked == question]
            for part in _parts(chosen):
                shown = [images[number] for number in part] if images is not None else None
                for number, text in zip(part, self._group(question, len(part), shown), strict=True):
                    said[number] = text
        return said

    @torch.no_grad()
    def _group(self, question: str, count: int, images: list[Any] | None) -> list[str]:
        inputs: dict[str, Tensor] = {}
        tokens = 0
        if images is not None:
            rows, columns = batches.merged_grid(images[0].size)
            tokens = rows * columns
            inputs["pixel_values"] = doubled(batches.patches(images)).flatten(0, 1)
            inputs["image_grid_thw"] = torch.tensor([[1, 2 * rows, 2 * columns]] * count)
        asked = batches.prompt(self.tokenizer, question, tokens)
        ids = torch.tensor([asked.ids] * count)
        if images is not None:
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        whole = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, **inputs
        )
        return [str(text) for text in self.tokenizer.decode_batch(whole[:, ids.shape[1] :].tolist())]


def evaluate(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """The result file's content: exact answers a kind, the controls, the kept-out font, other sizes."""
    began = time.monotonic()
    examiner = Examiner(folder)
    style = Style()
    result: dict[str, Any] = {
        "pictures_a_kind": count,
        "seed": seed,
        "held_out": "texts of two characters and more were never drawn in training; single characters cannot be kept out",
        "weights": "bfloat16 as stored, computed in float32 by transformers, greedy",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "parameters": sum(weight.numel() for weight in examiner.model.parameters()),
        "kinds": {},
        "controls": {},
        "kept_out_font": {"font": KEPT_OUT_FONT},
        "other_sizes": {},
    }
    fewer = max(1, count // 5)
    for kind in KINDS:
        drawn = [draw(kind, seed + number, "test", style) for number in range(count)]
        result["kinds"][kind] = _kind(examiner, drawn)
        result["controls"][kind] = _controls(examiner, drawn)
        if kind in TEXT_KINDS and available_fonts([KEPT_OUT_FONT]):
            result["kept_out_font"][kind] = _score(
                examiner, _varied(kind, count, seed, fonts=(KEPT_OUT_FONT,))
            ).written()
        for size in OTHER_SIZES:
            score = _score(examiner, _varied(kind, fewer, seed, size=size))
            result["other_sizes"].setdefault("x".join(map(str, size)), {})[kind] = score.written()
    result["evaluation_seconds"] = round(time.monotonic() - began, 1)
    return result


def _varied(kind: str, count: int, seed: int, **changes: Any) -> list[Drawn]:
    style = replace(Style(), **changes)
    return [draw(kind, seed + 1_000_000 + number, "test", style) for number in range(count)]


def _score(examiner: Examiner, drawn: list[Drawn]) -> Score:
    said = examiner.answer([item.question for item in drawn], [item.image for item in drawn])
    return _count(said, drawn)


def _count(said: list[str], drawn: list[Drawn]) -> Score:
    return Score(sum(text == item.answer for text, item in zip(said, drawn, strict=True)), len(drawn))


def _kind(examiner: Examiner, drawn: list[Drawn]) -> dict[str, Any]:
    said = examiner.answer([item.question for item in drawn], [item.image for item in drawn])
    found: dict[str, Any] = dict(_count(said, drawn).written())
    if any(len(item.text) > 1 and not held_out(item.text) for item in drawn):
        raise RuntimeError("a text of the evaluation was open to training")
    keys: dict[str, Callable[[Drawn], str]] = {"by_colour": lambda item: item.colour}
    if drawn[0].kind in TEXT_KINDS:
        keys |= {"by_length": lambda item: str(len(item.text)), "by_font": lambda item: item.font}
    for name, key in keys.items():
        found[name] = {}
        for value in sorted({key(item) for item in drawn}):
            pairs = [(text, item) for text, item in zip(said, drawn, strict=True) if key(item) == value]
            found[name][value] = _count([text for text, _ in pairs], [item for _, item in pairs]).written()
    wrong = [(item.answer, text) for text, item in zip(said, drawn, strict=True) if text != item.answer]
    found["wrong"] = [{"answer": answer, "said": text} for answer, text in wrong[:20]]
    return found


def _controls(examiner: Examiner, drawn: list[Drawn]) -> dict[str, Any]:
    """The same questions about the next item's picture, and about none: right only by chance."""
    questions, images = [item.question for item in drawn], [item.image for item in drawn]
    shuffled = examiner.answer(questions, images[1:] + images[:1])
    blind = examiner.answer(questions, None)
    return {"shuffled_pictures": _count(shuffled, drawn).written(), "no_picture": _count(blind, drawn).written()}


def _parts(numbers: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(numbers), GROUP):
        yield numbers[start : start + GROUP]
