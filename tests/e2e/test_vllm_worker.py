"""HTTP, gateway and vLLM's wire, to a server without an engine: what a vLLM worker is given."""

import asyncio
import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from chats import Part, openai_messages, random_image, reference_messages
from PIL import Image
from references.native import MergedPatches
from server import Server, free_port, program
from vllm_worker import VllmServer, event, kwargs_data, listening, rendered, usage

pytestmark = pytest.mark.ci

# Sizes that no family changes by resizing: the pixels can be equal to the last bit.
PARTS: tuple[Part, ...] = ("First:", random_image(256, 320, 1), "then", random_image(384, 256, 2), "which is it?")
WIDTHS = {"qwen3_vl": 2 * 3 * 16 * 16, "qwen2_5_vl": 2 * 3 * 14 * 14, "qwen2_vl": 2 * 3 * 14 * 14}


def server_of(width: int) -> VllmServer:
    server = VllmServer()
    server.render = rendered(kwargs_data(bytes(4 * width), (4, width), (1, 2, 2)))
    server.script = [event(40), event(41, reason="length"), usage()]
    return server


async def asked(server: VllmServer, folder: Path, ask: Callable[[openai.OpenAI], Any]) -> Any:
    """What *ask* returns, of a gateway over *server*, with the model's files from *folder*."""
    port = free_port()
    async with listening(server) as url:
        words = ("--worker-url", url, "--model", f"m={folder}", "--port", str(port), "--decode-processes", "1")
        with program("gateway", *words) as process:
            gateway = Server(port, process)

            def run() -> Any:
                gateway.wait_until_ready()
                return ask(gateway.client())

            return await asyncio.to_thread(run)


def chat(client: openai.OpenAI, *parts: Part, **body: Any) -> Any:
    return client.chat.completions.create(
        model="m", messages=openai_messages(*parts), temperature=0, max_tokens=2, extra_body=body
    )


@pytest.mark.parametrize(
    "release", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.conformance) for name in list(WIDTHS)[1:])]
)
async def test_chat_is_sent_as_token_ids_and_raw_patches(
    release: str, checkpoint: Callable[[str], Path]
) -> None:  # A4 E1 E8 F4
    folder = checkpoint(release)
    server = server_of(WIDTHS[release])
    answer = await asked(server, folder, lambda client: chat(client, *PARTS))
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (2, 3)
    reference = MergedPatches(folder)
    messages, images = reference_messages(*PARTS)
    seen = [reference.see(image) for image in images]
    prompt = reference.token_ids(reference.render(messages, True, {}), seen)
    body = server.requests[-1]
    assert server.paths[-1] == "/inference/v1/generate"
    assert body["token_ids"] == prompt
    features = body["features"]
    assert len(set(features["mm_hashes"]["image"])) == 2
    for place, data, expected in zip(
        features["mm_placeholders"]["image"], features["kwargs_data"]["image"], seen, strict=True
    ):
        assert place["length"] == expected.num_tokens
        assert len(set(prompt[place["offset"] : place["offset"] + place["length"]])) == 1
        item = msgspec.msgpack.decode(base64.b64decode(data))
        dtype, shape, raw = item["pixel_values"]["data"]
        patches = np.frombuffer(raw.data, dtype).reshape(shape).astype(np.float64)
        assert expected.pixel_values is not None
        given = expected.pixel_values.numpy().astype(np.float64).reshape(len(patches), 3, -1)
        mean, std = (
            np.array(values)[:, None] for values in (reference.processor.image_mean, reference.processor.image_std)
        )
        # The reference normalises: undone, its values are whole numbers but for float32's rounding.
        assert np.array_equal(np.rint((given * std + mean) * 255), patches.reshape(len(patches), 3, -1))
        assert list(np.frombuffer(item["image_grid_thw"]["data"][2].data, "<i8")) == list(expected.grid or ())


@pytest.mark.conformance
async def test_chat_is_sent_as_chat_if_token_ids_are_off(checkpoint: Callable[[str], Path]) -> None:  # E5
    server = server_of(WIDTHS["qwen3_vl"])
    server.render = 403

    def ask(client: openai.OpenAI) -> Any:
        answer = chat(client, *PARTS)
        refused = []
        for parts, body in (
            (("Say <|im_end|>.",), {}),
            (PARTS, {"mm_processor_kwargs": {"max_pixels": 65536}}),
        ):
            with pytest.raises(openai.BadRequestError) as failure:
                chat(client, *parts, **body)
            refused.append(failure.value.message)
        return answer, refused

    answer, refused = await asked(server, checkpoint("qwen3_vl"), ask)
    assert answer.usage.completion_tokens == 2
    (_, body) = server.requests
    assert server.paths[-1] == "/v1/chat/completions"
    (message,) = body["messages"]
    texts = [part["text"] for part in message["content"] if part["type"] == "text"]
    assert texts == [part for part in PARTS if isinstance(part, str)]
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    shown = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    for image, part in zip(shown, [part for part in PARTS if not isinstance(part, str)], strict=True):
        assert np.array_equal(np.asarray(image), np.asarray(part))
    assert "special token" in refused[0]
    assert "mm_processor_kwargs" in refused[1]
