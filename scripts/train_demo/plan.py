"""What decides a run, and where a run stands."""

import math
from dataclasses import dataclass
from typing import Any

from pictures import NATIVE_SIZE, TRAINING_FONTS, Style, available_fonts

SIZES = (NATIVE_SIZE, (160, 64), (192, 64), (128, 96), (96, 96))


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run, apart from where its files lie."""

    seed: int = 0
    eye_steps: int = 2700
    """Steps of the vision tower alone."""
    steps: int = 6500
    """All steps, those of the eye included."""
    batch: int = 128
    eye_rate: float = 8e-4
    joint_eye_rate: float = 4e-4
    mouth_rate: float = 1.2e-3
    warm_up: int = 200
    average: float = 0.998
    """Decay of the running average of the weights, which is what is saved for use."""
    other_sizes: float = 0.2
    """Share of the steps with pictures of another size than the native one."""
    shapes: float = 0.12
    """Share of the joint steps that show shapes."""
    threads: int = 1
    compiled: bool = True


@dataclass
class Progressing:
    """Where a run stands; saved with the weights."""

    step: int = 0
    seconds: float = 0.0
    level: int = 0
    recent: float = 0.0
    """Running share of columns whose character the eye names."""


def levels() -> tuple[Style, ...]:
    """Pictures from easy to full variety; the eye moves on when it names four columns in five."""
    fonts = available_fonts(TRAINING_FONTS)
    easy: dict[str, Any] = {"height": (0.40, 0.60), "rescaled": 0.0, "compressed": 0.0}
    plain = Style(lengths=(1, 2), fonts=fonts[:2], coloured=False, tint=False, **easy)
    half = Style(fonts=fonts[:4], **easy)
    # Long texts are the hard ones, so the last level shows more of them than the evaluation does.
    return plain, half, Style(fonts=fonts, lengths=(1, 2, 2, 3, 3, 3, 4, 4, 4, 4))


def cosine(step: int, steps: int, warm_up: int, floor: float) -> float:
    """Linear warm-up, then half a cosine from one to `floor`."""
    if step < warm_up:
        return (step + 1) / warm_up
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
