"""HTTP, gateway and SGLang's wire, to SMG's own servicer with a scripted engine: what that engine is given."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from references import Reference
from references.kimi_k3 import KimiK3
from references.kimi_k25 import KimiK25
from server import Server, free_port, program
from sglang_servicer import Engine, Rooms, arguments, listening, servicer_class

pytestmark = pytest.mark.ci

# Sizes that the family does not change by resizing: the pixels can be equal to the last bit.
PARTS: tuple[Part, ...] = ("First:", random_image(256, 320, 1), "then", random_image(384, 256, 2), "which is it?")
SWITCHES = {"thinking": False}
ANSWER_IDS = [40, 41]


def end_ids(folder: Path) -> list[int]:
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return [end] if isinstance(end, int) else end


def scripted(folder: Path, rooms: Rooms | None = None, **fields: Any) -> Engine:
    end = end_ids(folder)[0]
    steps: list[Any] = [(ANSWER_IDS, None), ([end], {"type": "stop", "matched": end})]
    return Engine(arguments(folder, **fields), steps, rooms or Rooms())


def ask(server: Server, *parts: Part, **body: Any) -> Any:
    server.wait_until_ready()
    return server.client().chat.completions.create(
        model="m", messages=openai_messages(*parts), temperature=0, extra_body=body
    )


def check(reference: Reference, request: Any, num_prompt_tokens: int) -> None:
    """The engine was given the reference's ids, patches, grids and places of placeholders."""
    chat, images = reference_messages(*PARTS)
    seen = [reference.see(image) for image in images]
    prompt = reference.token_ids(reference.render(chat, True, SWITCHES), seen)
    assert request.input_ids.tolist() == prompt
    assert num_prompt_tokens == len(prompt)
    (item,) = request.mm_inputs.mm_items
    expected = torch.cat([one.pixel_values for one in seen if one.pixel_values is not None])
    assert item.feature.dtype == torch.float32
    assert item.feature.shape[1:] == (3, 14, 14)
    assert torch.equal(item.feature, expected.to(torch.float32))
    assert item.model_specific_data["grid_thws"].tolist() == [list(one.grid or ()) for one in seen]
    assert item.model_specific_data["grid_thws"].device.type == "cpu"
    assert [last - start + 1 for start, last in item.offsets] == [one.num_tokens for one in seen]
    assert {prompt[at] for start, last in item.offsets for at in range(start, last + 1)} == {
        request.mm_inputs.im_token_id
    }


@pytest.mark.parametrize(
    ("release", "reference"), [("kimi_k25", KimiK25), pytest.param("kimi_k3", KimiK3, marks=pytest.mark.conformance)]
)
async def test_a_chat_with_images_reaches_the_engine(
    release: str,
    reference: Callable[[Path], Reference],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # A4
    folder, port = checkpoint(release), free_port()
    engine = scripted(folder)
    with servicer_class(monkeypatch) as servicer_of:
        async with listening(engine.servicer(servicer_of)) as target:
            flags = ("--worker-url", f"sglang://{target}", "--port", str(port), "--decode-processes", "1")
            with program("gateway", *flags) as process:
                body = {"chat_template_kwargs": SWITCHES}
                answer = await asyncio.to_thread(ask, Server(port, process), *PARTS, **body)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ANSWER_IDS) + 1
    check(reference(folder), engine.requests[0], answer.usage.prompt_tokens)


@pytest.mark.conformance
async def test_a_chat_with_images_reaches_both_legs(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:  # A8
    folder, port, rooms = checkpoint("kimi_k25"), free_port(), Rooms()
    prefill = scripted(folder, rooms, disaggregation_mode="prefill")
    decode = scripted(folder, rooms, disaggregation_mode="decode")
    with servicer_class(monkeypatch) as servicer_of:
        workers = listening(prefill.servicer(servicer_of)), listening(decode.servicer(servicer_of))
        async with workers[0] as one, workers[1] as other:
            urls = ("--worker-url", f"sglang://{one}?role=prefill", "--worker-url", f"sglang://{other}?role=decode")
            with program("gateway", *urls, "--port", str(port), "--decode-processes", "1") as process:
                body = {"chat_template_kwargs": SWITCHES}
                answer = await asyncio.to_thread(ask, Server(port, process), *PARTS, **body)
    assert answer.usage.completion_tokens == len(ANSWER_IDS) + 1
    check(KimiK25(folder), prefill.requests[0], answer.usage.prompt_tokens)
    (leg,) = decode.requests
    assert leg.mm_inputs is None
    assert leg.input_ids == prefill.requests[0].input_ids
    assert leg.bootstrap_room == prefill.requests[0].bootstrap_room


@pytest.mark.conformance
async def test_images_of_a_model_with_image_positions(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:  # A8
    folder, port = checkpoint("qwen3_vl"), free_port()
    engine = scripted(folder)
    with servicer_class(monkeypatch) as servicer_of:
        async with listening(engine.servicer(servicer_of)) as target:
            flags = ("--worker-url", f"sglang://{target}", "--port", str(port), "--decode-processes", "1")
            with program("gateway", *flags) as process:
                server = Server(port, process)
                answer = await asyncio.to_thread(ask, server, "Only text.")
                with pytest.raises(openai.BadRequestError, match="positions") as caught:
                    await asyncio.to_thread(ask, server, *PARTS)
    assert answer.usage.completion_tokens == len(ANSWER_IDS) + 1
    assert caught.value.code == "unsupported_parameter"
    assert len(engine.requests) == 1
