"""Answers through HTTP, compared with transformers' processor and network."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from chats import Part, openai_messages, random_image, reference_messages
from PIL import Image
from references.networks import image_text_model
from server import serving

MAX_TOKENS = 12
CHATS: tuple[tuple[Part, ...], ...] = (
    ("What is it?",),
    (random_image(300, 60, 1), "Describe the image."),
    ("First:", random_image(64, 96, 2), "second: ", random_image(40, 300, 3), "Compare the two images."),
)

Process = Callable[[list[Any], list[Image.Image]], Mapping[str, Any]]
"""Returns what `generate` takes for messages and their images."""


@torch.inference_mode()
def check_answers(folder: Path, process: Process, **body: Any) -> None:
    """Check that the answers to CHATS are the reference's; requests have *body* too."""
    model = image_text_model(folder)
    with serving(str(folder), "--max-model-len", "2048") as server:
        for parts in CHATS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers warns about its own deprecations
                inputs = process(*reference_messages(*parts))
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
            length = inputs["input_ids"].shape[1]
            answer: Any = server.client().chat.completions.create(
                model=server.name,
                messages=openai_messages(*parts),
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True, **body},
            )
            assert answer.prompt_token_ids == output[:length]
            assert answer.choices[0].token_ids == output[length:]


def processed(processor: Any, prompt: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return what *processor* makes of *prompt*, without what only networks with M-RoPE take."""
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    return {key: value for key, value in inputs.items() if key != "mm_token_type_ids"}
