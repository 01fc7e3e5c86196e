"""Qwen3.5 through HTTP, gateway and our worker: answers are the reference's, and a chat goes on from its states. A1 A10"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from processor_answers import check_json
from references.native import MergedPatches
from references.networks import image_text_model
from server import Server, serving
from tool_calls import check_calls

pytestmark = pytest.mark.conformance

MAX_TOKENS = 12
CHATS: dict[str, tuple[Part, ...]] = {
    "text only": ("What is it?",),
    "two images": (random_image(64, 96, 2), random_image(100, 300, 3), "Compare the two images."),
}


@pytest.fixture(scope="module")
def folder(network_folder: Callable[[str], Path]) -> Path:
    return network_folder("qwen3_5_moe")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--max-model-len", "2048", "--state-snapshot-bytes", "1000000") as running:
        yield running


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[MergedPatches, Any]:
    """transformers' processor, and its network."""
    return MergedPatches(folder), image_text_model(folder)


@torch.inference_mode()
def complete(reference: tuple[MergedPatches, Any], parts: tuple[Part, ...]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the greedy answer."""
    patches, model = reference
    messages, images = reference_messages(*parts)
    seen = [patches.see(one) for one in images]
    prompt = patches.token_ids(patches.render(messages, add_generation_prompt=True, switches={}), seen)
    ids = torch.tensor([prompt])
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
    if seen:
        inputs["pixel_values"] = torch.cat([one.pixel_values for one in seen if one.pixel_values is not None])
        inputs["image_grid_thw"] = torch.tensor([one.grid for one in seen])
    model.model.rope_deltas = None
    output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
    return prompt, output[len(prompt) :]


def ask(server: Server, parts: tuple[Part, ...]) -> Any:
    return server.client().chat.completions.create(
        model=server.name,
        messages=openai_messages(*parts),
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True},
    )


@pytest.mark.parametrize("parts", CHATS.values(), ids=CHATS.keys())
def test_answer_equals_the_reference(
    server: Server, reference: tuple[MergedPatches, Any], parts: tuple[Part, ...]
) -> None:
    prompt, expected = complete(reference, parts)
    for num_cached in (0, (len(prompt) - 1) // 16 * 16):
        answer = ask(server, parts)
        assert answer.prompt_token_ids == prompt
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.choices[0].token_ids == expected
        assert (answer.usage.prompt_tokens_details.cached_tokens if num_cached else 0) == num_cached


def test_json_with_and_without_reasoning(server: Server) -> None:  # F13
    check_json(server, "enable_thinking")


def test_tool_calls_follow_the_grammar(server: Server) -> None:  # F13
    switches = {"chat_template_kwargs": {"enable_thinking": False}}
    check_calls(server, None, tool_choice="required", parallel_tool_calls=False, n=2, extra_body=switches)
