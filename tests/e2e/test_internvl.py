"""InternVL through HTTP, gateway and our worker: its answer is the reference's for the same images. # A1 A4 A10"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from references.native import CroppedTiles, load
from references.networks import image_text_model
from server import serving

pytestmark = pytest.mark.conformance

MAX_TOKENS = 12
CHATS: tuple[tuple[Part, ...], ...] = (
    ("What is it?",),
    (random_image(300, 60, 1), "Describe the image."),
    ("First:", random_image(64, 96, 2), "second: ", random_image(40, 300, 3), "Compare the two images."),
)


@torch.inference_mode()
def test_answers_equal_the_reference(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("internvl")
    template, processor, model = CroppedTiles(folder), load(folder, "AutoProcessor"), image_text_model(folder)
    with serving(str(folder), "--max-model-len", "2048") as server:
        for parts in CHATS:
            messages, images = reference_messages(*parts)
            prompt = template.render(messages, add_generation_prompt=True, switches={})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers warns about its own deprecations
                inputs = processor(text=prompt, images=images or None, return_tensors="pt")
            inputs = {key: value for key, value in inputs.items() if key != "mm_token_type_ids"}
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
            length = inputs["input_ids"].shape[1]
            answer: Any = server.client().chat.completions.create(
                model=server.name,
                messages=openai_messages(*parts),
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            assert answer.prompt_token_ids == output[:length]
            assert answer.choices[0].token_ids == output[length:]
