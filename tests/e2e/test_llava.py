"""LLaVA-NeXT through HTTP, gateway and our worker: its answer is the reference's for the same image. # A1 A10"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from references.native import Crops
from references.networks import image_text_model
from server import Server, serving

pytestmark = pytest.mark.conformance

MAX_TOKENS = 12
CHATS: dict[str, tuple[Part, ...]] = {
    "text only": ("What is it?",),
    "a wide image": (random_image(300, 60, 1), "Describe the image."),
    "two images": (random_image(64, 96, 2), random_image(40, 300, 3), "Compare the two images."),
}


@pytest.fixture(scope="module")
def folder(network_folder: Callable[[str], Path]) -> Path:
    return network_folder("llava_next")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Crops, Any]:
    """transformers' processor, and its network."""
    return Crops(folder), image_text_model(folder)


@torch.inference_mode()
def complete(reference: tuple[Crops, Any], parts: tuple[Part, ...]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the greedy answer."""
    crops, model = reference
    messages, images = reference_messages(*parts)
    prompt = crops.render(messages, add_generation_prompt=True, switches={})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        inputs = crops.processor(text=prompt, images=images or None, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
    length = inputs["input_ids"].shape[1]
    return output[:length], output[length:]


@pytest.mark.parametrize("parts", CHATS.values(), ids=CHATS.keys())
def test_answer_equals_the_reference(server: Server, reference: tuple[Crops, Any], parts: tuple[Part, ...]) -> None:
    prompt, expected = complete(reference, parts)
    answer: Any = server.client().chat.completions.create(
        model=server.name,
        messages=openai_messages(*parts),
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert answer.prompt_token_ids == prompt
    assert answer.choices[0].token_ids == expected
    assert answer.usage.completion_tokens == len(expected)
