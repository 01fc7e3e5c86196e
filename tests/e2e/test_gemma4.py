"""Gemma 4 through HTTP, gateway and Saccade's own engine, against transformers' processor and network. # A10"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from processor_answers import check_json
from references.native import PooledPatches, SquarePatches
from references.networks import ORACLES, GemmaOracle
from server import Server, serving
from tool_calls import check_calls

from benchmarks.fleet.load import ask_all
from benchmarks.fleet.running import MODEL, gateway, workers

pytestmark = pytest.mark.conformance

NUM_TOKENS = 64
REFERENCES = {"gemma4": PooledPatches, "gemma4_e2b": PooledPatches, "gemma4_unified": SquarePatches}
CHATS: tuple[tuple[Part, ...], ...] = (
    ("What is it?",),
    (random_image(300, 60, 1), "Describe the image."),
    ("First:", random_image(64, 96, 2), "second:", random_image(40, 300, 3), "Compare the two images."),
)


@pytest.fixture(scope="module", params=REFERENCES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, network_folder: Callable[[str], Path]) -> Path:
    return network_folder(name)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--max-model-len", "2048") as server:
        yield server


@torch.inference_mode()
def test_answers_equal_the_reference(server: Server, name: str, folder: Path) -> None:
    reference, oracle = REFERENCES[name](folder), ORACLES[name](folder)
    assert isinstance(oracle, GemmaOracle)
    for parts in CHATS:
        chat, images = reference_messages(*parts)
        prompt = reference.token_ids(reference.render(chat, True, {}), [reference.see(image) for image in images])
        inputs: dict[str, Any] = {}
        if images:
            made = reference.processor(images=images, return_tensors="pt")
            inputs = {key: made[key] for key in ("pixel_values", "image_position_ids")}
        answer: Any = server.client().chat.completions.create(
            model=server.model,
            messages=openai_messages(*parts),
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert answer.prompt_token_ids == prompt
        assert answer.usage.prompt_tokens == len(prompt)
        token_ids = answer.choices[0].token_ids
        assert len(token_ids) == NUM_TOKENS
        ids = torch.tensor([prompt + token_ids[:-1]])
        kinds = (ids == oracle.placeholder_token_ids[0]).long()
        logits = oracle.model(input_ids=ids, mm_token_type_ids=kinds, **inputs, **oracle.masks(ids, kinds)).logits[
            0, len(prompt) - 1 :
        ]
        logits = logits.index_fill(1, torch.tensor(oracle.placeholder_token_ids), float("-inf"))
        assert logits.argmax(1).tolist() == token_ids


def test_json_with_and_without_reasoning(server: Server) -> None:  # F13
    check_json(server, "enable_thinking")


def test_tool_calls_follow_the_grammar(server: Server) -> None:  # F13
    check_calls(server, None, tool_choice="required", parallel_tool_calls=False, n=2)
    check_calls(server, {"zoom"}, stream=True, tool_choice={"type": "function", "function": {"name": "zoom"}})


def test_count_of_cached_tokens_is_the_worker_s_while_windows_are_evicted(
    network_folder: Callable[[str], Path], tmp_path: Path
) -> None:  # E5
    """Chats about one image go to one worker, which keeps all of their blocks but those of layers with a window."""
    flags = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "4096000")
    bodies = [
        {
            "model": MODEL,
            "messages": openai_messages(random_image(90, 90, 1), f"{number}: {'why? ' * (50 + 5 * number)}"),
            "max_tokens": 4,
            "n": 1 + number % 2,
        }
        for number in range(10)
    ]
    with workers(network_folder("gemma4"), 2, tmp_path, flags) as urls, gateway(urls, "auto", tmp_path / "log") as over:
        for number in (*range(10), *reversed(range(10)), 0, 1):
            over.wait_until_idle()
            (expected,) = (one["overlap_tokens"] for one in over.route(bodies[number])["candidates"] if one["chosen"])
            (asked,) = ask_all(over.url, bodies, [number], 1)
            assert asked.cached_tokens == expected
        over.wait_until_idle()
        loads = [worker["load"] for worker in over.workers()]
    assert not any(load["evicted_blocks_total"] for load in loads)
    assert any(load["evicted_window_tokens_total"] for load in loads)
