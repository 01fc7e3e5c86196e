"""HTTP, gateway and TokenSpeed's wire, to SMG's own servicer with a scripted engine: what that engine is given."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from references import Reference
from references.kimi_k3 import KimiK3
from references.kimi_k25 import KimiK25
from references.native import MergedPatches
from server import Server, free_port, program
from smg_servicer import Engine, servicer_class
from tokenspeed_worker import listening

pytestmark = pytest.mark.ci

# Sizes that no family changes by resizing: the pixels can be equal to the last bit.
PARTS: tuple[Part, ...] = ("First:", random_image(256, 320, 1), "then", random_image(384, 256, 2), "which is it?")
ANSWER_IDS = [40, 41]


@dataclass(frozen=True)
class Release:
    """A checkpoint, its reference, the name of its images' grids on the wire, and the switches of its template."""

    checkpoint: str
    reference: Callable[[Path], Reference]
    grid_name: str
    switches: Mapping[str, Any]


RELEASES = [
    Release("kimi_k25", KimiK25, "grid_thws", {"thinking": False}),
    Release("kimi_k3", KimiK3, "grid_thws", {"thinking": False}),
    Release("qwen3_vl", MergedPatches, "image_grid_thw", {}),
]


def ask(server: Server, release: Release) -> Any:
    server.wait_until_ready()
    return server.client().chat.completions.create(
        model="m",
        messages=openai_messages(*PARTS),
        temperature=0,
        extra_body={"chat_template_kwargs": release.switches} if release.switches else {},
    )


@pytest.mark.parametrize(
    "release",
    [RELEASES[0], *(pytest.param(release, marks=pytest.mark.conformance) for release in RELEASES[1:])],
    ids=lambda release: release.checkpoint,
)
async def test_a_chat_with_images_reaches_the_engine(
    release: Release, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:  # A4
    folder = checkpoint(release.checkpoint)
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    end_ids = [end] if isinstance(end, int) else end
    steps = [(ANSWER_IDS, None), (end_ids[:1], {"type": "stop", "matched": end_ids[0]})]
    engine, port = Engine.serving(folder, steps, end_ids[0], vocab_size=2048), free_port()
    with servicer_class(monkeypatch) as servicer_of:
        async with listening(engine.servicer(servicer_of)) as url:
            with program("gateway", "--worker-url", url, "--port", str(port), "--decode-processes", "1") as process:
                answer = await asyncio.to_thread(ask, Server(port, process), release)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ANSWER_IDS) + 1
    check(release, release.reference(folder), engine, answer.usage.prompt_tokens)


def check(release: Release, reference: Reference, engine: Engine, num_prompt_tokens: int) -> None:
    """The engine was given the reference's ids, patches, grids and places of placeholders."""
    chat, images = reference_messages(*PARTS)
    seen = [reference.see(image) for image in images]
    prompt = reference.token_ids(reference.render(chat, True, release.switches), seen)
    (request,) = engine.requests
    assert request.input_ids == prompt
    assert num_prompt_tokens == len(prompt)
    items = request.precomputed_multimodal_inputs.mm_items
    for item, expected in zip(items, seen, strict=True):
        assert expected.pixel_values is not None
        assert item.feature.dtype == torch.bfloat16
        assert torch.equal(item.feature, expected.pixel_values.to(torch.bfloat16))
        assert item.model_specific_data[release.grid_name].tolist() == [list(expected.grid or ())]
        (start, last), *others = item.offsets
        assert (last - start + 1, others) == (expected.num_tokens, [])
        assert len(set(prompt[start : last + 1])) == 1
