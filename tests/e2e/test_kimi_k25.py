"""Kimi-K2.5 through HTTP, gateway and Saccade's own engine, against the release's processor and transformers. # A10"""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import clips
import engines
import numpy as np
import pytest
import torch
from chats import Part, openai_messages, random_image, reference_messages
from processor_answers import check_json
from references import Seen
from references.kimi_k25 import KimiK25
from references.networks import KimiOracle, image_text_model
from server import Server, serving
from tool_calls import check_calls

from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits
from saccade.models import load_video_layout, load_video_pixels
from saccade.models.files import parse_json, read_model_files
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.conformance

NUM_TOKENS = 6
TEXT = {"type": "text", "text": "What happens?"}
CHATS: dict[str, tuple[Part, ...]] = {
    "text": ("What is it?",),
    "two images between texts": (
        "First:",
        random_image(150, 100, 1),
        "then",
        random_image(57, 203, 2),
        "\u4f60\u597d?",
    ),
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
    chat, images = reference_messages(*parts)
    seen = [reference.see(image) for image in images]
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
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].token_ids == token_ids


def test_json_with_and_without_reasoning(server: Server) -> None:  # F13
    check_json(server, "thinking")


def test_tool_calls_follow_the_grammar(server: Server) -> None:  # F13
    switches = {"chat_template_kwargs": {"thinking": False}}
    check_calls(server, None, tool_choice="required", parallel_tool_calls=False, n=2, extra_body=switches)


def test_video_is_clips_after_their_times(server: Server, folder: Path) -> None:
    """Six of the twelve frames, three seconds: a clip of four frames, and one of two from 2.25 s on."""
    encoded = clips.clip()
    url = f"data:video/mp4;base64,{base64.b64encode(encoded).decode()}"
    answer = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}, TEXT]}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    reference = KimiK25(folder)
    chat = [{"role": "user", "content": [{"type": "video"}, TEXT]}]
    clip = "{}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    text = "".join(map(clip.format, ("00:00:00.000", "00:00:02.250")))
    rendered = reference.render(chat, True, {}).replace("<|kimi_k25_video_placeholder|>", text)
    tokens_of_a_frame = 6  # 64 x 48, padded to 84 x 56
    prompt = reference.token_ids(rendered, [Seen(tokens_of_a_frame), Seen(tokens_of_a_frame)])
    assert answer.prompt_token_ids == prompt
    ids = answer.choices[0].token_ids
    placeholder = torch.tensor([engines.placeholder_id(folder)])
    logits = KimiOracle(folder).logits(asked(folder, encoded, prompt), ids).index_fill(1, placeholder, float("-inf"))
    chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert (logits.amax(1) - chosen <= 2 * KimiOracle.atol).all()


def asked(folder: Path, encoded: bytes, prompt: list[int]) -> EngineRequest:
    """Return what a worker gets for *prompt*, whose only media are those of the video."""
    files = read_model_files(folder)
    config = parse_json(files, "config.json")
    layout_of = load_video_layout("kimi_k25")(config, parse_json(files, "preprocessor_config.json"), {})
    header = read_header(encoded, VideoLimits())
    layout = layout_of.video(header, layout_of.settings)
    out = np.zeros(layout.pixel_shape, np.uint8)
    frames = read_frames(encoded, header, layout.frames, VideoLimits())
    load_video_pixels("kimi_k25")(layout_of.settings).write_pixels(frames, layout, out)
    places = [place for place, token_id in enumerate(prompt) if token_id == engines.placeholder_id(folder)]
    item = MediaItem(
        modality="video",
        content_hash=bytes(32),
        grid=layout.grid,
        spans=tuple(Span(place, 1) for place in places),
        pixel_shape=layout.pixel_shape,
        inline=out.tobytes(),
    )
    return EngineRequest(request_id="a", token_ids=prompt, sampling=SamplingParams(max_tokens=1), media=(item,))
