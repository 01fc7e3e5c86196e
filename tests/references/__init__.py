"""Second implementations: what the releases' own code makes of images and prompts, for Saccade to be equal to.

native      whatever transformers serves by itself
kimi_k25    the release's processor and tokenizer, written again
kimi_k3     the same, and the program that writes its prompts
phi3_v      the same
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

Chat = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Seen:
    """What a reference makes of one image.

    *pixel_values* is float32, normalised, without a batch axis; *pixels* is uint8, before that. A reference has at
    least one of them. *grid* is (frames, rows, columns) in patches, where it names one. *text* is what stands for the
    image in the prompt, where that is more than placeholders.
    """

    num_tokens: int
    pixel_values: torch.Tensor | None = None
    grid: tuple[int, ...] | None = None
    pixels: npt.NDArray[np.uint8] | None = None
    text: str | None = None


class Reference(Protocol):
    """One release's own preprocessing, made from a checkpoint's folder."""

    def see(self, image: Image.Image) -> Seen:
        """Return what becomes of an image. Raises ValueError for one that the release cannot process."""

    def render(self, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
        """Return the prompt as the chat template writes it."""

    def token_ids(self, prompt: str, seen: Sequence[Seen]) -> list[int]:
        """Return the ids of a rendered prompt whose i-th image is seen[i]."""


def render_template(template: str, chat: Chat, add_generation_prompt: bool, switches: Mapping[str, Any]) -> str:
    """Return the prompt as transformers renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    prompts, _ = render_jinja_template(
        conversations=[list(chat)],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **switches,
    )
    return str(prompts[0])
