"""Kimi-K2.5 through HTTP, gateway and Saccade's own engine, against the release's processor and transformers. # A10"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from chats import Part, openai_messages, picture, reference_messages
from references.kimi_k25 import KimiK25
from references.networks import image_text_model
from server import Server, serving
from tool_calls import check_calls

pytestmark = pytest.mark.conformance

NUM_TOKENS = 6
CHATS: dict[str, tuple[Part, ...]] = {
    "text": ("What is it?",),
    "two pictures between texts": ("First:", picture(150, 100, 1), "then", picture(57, 203, 2), "\u4f60\u597d?"),
}


@pytest.fixture(scope="module")
def folder(network_folder: Callable[[str], Path]) -> Path:
    return network_folder("kimi_k25")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--max-model-len", "2048") as server:
        yield server


@torch.inference_mode()
def expected(folder: Path, parts: tuple[Part, ...]) -> tuple[list[int], list[int]]:
    """The ids of the prompt, and of the reference's greedy answer."""
    reference, model = KimiK25(folder), image_text_model(folder)
    chat, pictures = reference_messages(*parts)
    seen = [reference.see(image) for image in pictures]
    prompt = reference.token_ids(reference.render(chat, True, {}), seen)
    inputs = {}
    if seen:
        inputs["pixel_values"] = torch.cat([one.pixel_values for one in seen if one.pixel_values is not None])
        inputs["image_grid_thw"] = torch.tensor([one.grid for one in seen])
    answer: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=torch.tensor([prompt + answer]), **inputs).logits[0, -1]
        logits[model.config.image_token_id] = float("-inf")
        answer.append(int(logits.argmax()))
    return prompt, answer


@pytest.mark.parametrize("parts", CHATS.values(), ids=CHATS.keys())
def test_answer_equals_the_reference(server: Server, folder: Path, parts: tuple[Part, ...]) -> None:
    answer = server.client().chat.completions.create(
        model=server.model,
        messages=openai_messages(*parts),
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    prompt, token_ids = expected(folder, parts)
    assert answer.prompt_token_ids == prompt
    assert answer.choices[0].token_ids == token_ids


def test_calls_are_held(server: Server) -> None:  # F13
    switches = {"chat_template_kwargs": {"thinking": False}}
    check_calls(server, None, tool_choice="required", parallel_tool_calls=False, n=2, extra_body=switches)
