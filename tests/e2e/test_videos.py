"""Videos through HTTP, gateway, decode processes and worker: prompts and answers are the reference's. A1 A10"""

import base64
import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import chats
import clips
import numpy as np
import openai
import pytest
import torch
from checkpoints.vocabulary import write_json
from PIL import Image
from references.native import MergedPatches
from references.networks import image_text_model
from server import Server, serving
from torchvision_schemas import import_torchvision

from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits

pytestmark = pytest.mark.ci

MAX_TOKENS = 10
SMALL = {"size": {"shortest_edge": 40_000, "longest_edge": 60_000}}
"""Limits of pixels for frames: prompts stay short, and no clip has more groups of frames than columns, see decision 37."""

SERVED = clips.served()
BROKEN = clips.broken()
LIMITS = VideoLimits()
QUESTION = {"type": "text", "text": "What happens?"}


@dataclass(frozen=True)
class Tiny:
    """A family's tiny checkpoint, the reference's processor of videos, and its settings; *times* stand in the prompt."""

    network: str
    processor: str
    settings: Mapping[str, Any]
    times: bool = False


OLDER = {"patch_size": 14, **SMALL, "cap_pixels_per_frame": True}
NEWER = {"patch_size": 16, "size": {"shortest_edge": 100_000, "longest_edge": 300_000}}
FAMILIES = {
    "qwen2_vl": Tiny("qwen2_vl", "Qwen2VLVideoProcessor", OLDER),
    "qwen2_5_vl": Tiny("qwen2_5_vl", "Qwen2VLVideoProcessor", OLDER),
    "qwen3_vl": Tiny("qwen3_vl", "Qwen3VLVideoProcessor", NEWER, times=True),
    "qwen3_5": Tiny("qwen3_5", "Qwen3VLVideoProcessor", NEWER, times=True),
}
EVERYDAY = ("qwen3_vl",)


@pytest.fixture(
    scope="module",
    params=[name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.conformance) for name in FAMILIES],
)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return FAMILIES[str(request.param)]


@pytest.fixture(scope="module")
def folder(tiny: Tiny, network_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with settings for videos of its own."""
    folder = tmp_path_factory.mktemp("videos") / tiny.network
    folder.mkdir()
    for file in network_folder(tiny.network).iterdir():
        (folder / file.name).symlink_to(file)
    write_json(folder, "video_preprocessor_config.json", dict(tiny.settings))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--max-model-len", "4096", "--allowed-media-networks", "127.0.0.0/8") as running:
        yield running


def data_url(encoded: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(encoded).decode()}"


def video(encoded: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(encoded)}}


def ask(server: Server, *parts: dict[str, Any], **extra: Any) -> Any:
    return server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": list(parts)}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, **extra},
    )


class Reference:
    """transformers' processors, template and network."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        import_torchvision()
        import transformers

        self.text = MergedPatches(folder)
        self.model = image_text_model(folder)
        self.times = tiny.times
        self.videos = getattr(transformers, tiny.processor)(
            **tiny.settings, temporal_patch_size=2, merge_size=2, do_sample_frames=True, fps=2.0
        )

    def see(self, encoded: bytes, indices: list[int] | None = None, **options: Any) -> Any:
        from transformers.video_utils import VideoMetadata

        header = read_header(encoded, LIMITS)
        frames = np.stack(list(read_frames(encoded, header, indices or range(header.num_frames), LIMITS)))
        metadata = VideoMetadata(total_num_frames=header.num_frames, fps=header.fps)
        if indices is not None:
            metadata.frames_indices = np.array(indices)
            options |= {"do_sample_frames": False, "fps": None}
        return self.videos(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[metadata],
            return_metadata=True,
            return_tensors="pt",
            **options,
        )

    @torch.inference_mode()
    def complete(self, parts: list[Any], **options: Any) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt and of the greedy answer; a part is a text, a video or an image."""
        content, inputs, seen = [], {}, []
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif isinstance(part, bytes):
                content.append({"type": "video"})
                made = self.see(part, **options)
                seen.append(self.written(made))
                inputs |= {"pixel_values_videos": made["pixel_values_videos"], "video_grid_thw": made["video_grid_thw"]}
                inputs |= self.seconds(made)
            else:
                content.append({"type": "image"})
                one = self.text.see(part)
                seen.append(("<|image_pad|>", "<|image_PAD|>" * one.num_tokens))
                inputs |= {"pixel_values": one.pixel_values, "image_grid_thw": torch.tensor([one.grid])}
        prompt = self.text.render([{"role": "user", "content": content}], add_generation_prompt=True, switches={})
        for token, text in seen:
            prompt = prompt.replace(token, text, 1)
        ids = torch.tensor([self.text.tokenizer(prompt.replace("PAD", "pad"))["input_ids"]])
        config = self.model.config
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        self.model.model.rope_deltas = None
        output = self.model.generate(
            input_ids=ids, mm_token_type_ids=kinds, **inputs, max_new_tokens=MAX_TOKENS, do_sample=False
        )
        return ids[0].tolist(), output[0, ids.shape[1] :].tolist()

    def prompt_ids(self, encoded: bytes) -> list[int]:
        """Return the ids that the release's own processor makes of a chat with a video and the question."""
        import transformers
        from transformers.video_utils import VideoMetadata

        header = read_header(encoded, LIMITS)
        frames = np.stack(list(read_frames(encoded, header, range(header.num_frames), LIMITS)))
        kind = "Qwen3VLProcessor" if self.times else "Qwen2_5_VLProcessor"
        processor = getattr(transformers, kind)(self.text.processor, self.text.tokenizer, self.videos)
        content = [{"type": "video"}, QUESTION]
        made = processor(
            text=[self.text.render([{"role": "user", "content": content}], add_generation_prompt=True, switches={})],
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=[VideoMetadata(total_num_frames=header.num_frames, fps=header.fps)],
            do_sample_frames=True,
        )
        ids: list[int] = made["input_ids"][0]
        return ids

    def written(self, made: Any) -> tuple[str, str]:
        """Return what the template writes for a video, and what takes its place."""
        groups, rows, columns = made["video_grid_thw"][0].tolist()
        pads = "<|video_PAD|>" * (rows * columns // 4)
        if not self.times:
            return "<|video_pad|>", pads * groups
        seen = made["video_metadata"][0]
        times = [index / seen.fps for index in seen.frames_indices.tolist()]
        times += times[-1:] * (len(times) % 2)
        middles = [(first + last) / 2 for first, last in zip(times[::2], times[1::2], strict=True)]
        text = "".join(f"<{middle:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for middle in middles)
        return "<|video_pad|>", text

    def seconds(self, made: Any) -> dict[str, Any]:
        if self.model.config.model_type != "qwen2_5_vl":
            return {}
        return {"second_per_grid_ts": [2 / made["video_metadata"][0].sampled_fps]}


@pytest.fixture(scope="module")
def reference(tiny: Tiny, folder: Path) -> Callable[[], Reference]:
    return cache(lambda: Reference(tiny, folder))


def check(answer: Any, expected: tuple[list[int], list[int]]) -> None:
    assert answer.prompt_token_ids == expected[0]
    assert answer.usage.prompt_tokens == len(expected[0])
    assert answer.choices[0].token_ids == expected[1]


def test_prompts_equal_the_release_processors(server: Server, reference: Callable[[], Reference]) -> None:
    """With the tokens around a video that the template writes, see decision 37."""
    answer = ask(server, video(SERVED["h264"]), QUESTION)
    assert answer.prompt_token_ids == reference().prompt_ids(SERVED["h264"])


@pytest.mark.parametrize(
    "name", ["h264", *(pytest.param(name, marks=pytest.mark.conformance) for name in ("vp9 of odd sides", "gif"))]
)
def test_answers_equal_the_reference(server: Server, reference: Callable[[], Reference], name: str) -> None:
    check(ask(server, video(SERVED[name]), QUESTION), reference().complete([SERVED[name], "What happens?"]))


def test_a_video_beside_an_image(server: Server, reference: Callable[[], Reference]) -> None:
    still = chats.random_image(96, 64, 3)
    buffered = {"type": "image_url", "image_url": {"url": chats.data_url(still)}}
    answer = ask(server, QUESTION, buffered, video(SERVED["hevc"]), QUESTION)
    check(answer, reference().complete(["What happens?", still, SERVED["hevc"], "What happens?"]))


def test_options_choose_the_frames(server: Server, reference: Callable[[], Reference]) -> None:
    encoded = SERVED["h264"]
    for extra, options in (
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, {"num_frames": 8, "fps": None}),
        ({"mm_processor_kwargs": {"fps": 4}}, {"fps": 4.0}),
    ):
        subject = reference()
        if "num_frames" in options:
            subject.videos.fps = None
        check(ask(server, video(encoded), QUESTION, **extra), subject.complete([encoded, "What happens?"], **options))
        subject.videos.fps = 2.0


def test_frames_that_a_client_sampled(server: Server, reference: Callable[[], Reference]) -> None:
    encoded, indices = SERVED["h264"], [0, 3, 5]
    header = read_header(encoded, LIMITS)
    frames = [Image.fromarray(frame) for frame in read_frames(encoded, header, indices, LIMITS)]
    url = "data:video/jpeg;base64," + ",".join(chats.data_url(frame).partition(",")[2] for frame in frames)
    times = {"fps": header.fps, "frames_indices": indices, "total_num_frames": header.num_frames}
    sampled = {"type": "video_url", "video_url": {"url": url}}
    answer = ask(server, sampled, QUESTION, media_io_kwargs={"video": times})
    check(answer, reference().complete([encoded, "What happens?"], indices=indices))


def test_a_video_seen_again_is_cached_by_bytes_and_sampling(server: Server) -> None:
    encoded = clips.clip(width=80, height=64)
    first = ask(server, video(encoded), QUESTION)
    encoded_items = server.settled("saccade_encoded_items_total")
    again = ask(server, video(encoded), QUESTION)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert again.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 32
    assert server.settled("saccade_encoded_items_total") == encoded_items
    other = ask(server, video(encoded), QUESTION, media_io_kwargs={"video": {"num_frames": 2}})
    assert other.usage.prompt_tokens < first.usage.prompt_tokens
    assert server.settled("saccade_encoded_items_total") == encoded_items + 1


def test_videos_are_fetched_as_images_are(server: Server, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(SERVED["h264"])

    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{web.server_address[1]}/clip.mp4"
        try:
            fetched = ask(server, {"type": "video_url", "video_url": {"url": url}}, QUESTION)
        finally:
            web.shutdown()
            thread.join()
    assert fetched.choices[0].token_ids == ask(server, video(SERVED["h264"]), QUESTION).choices[0].token_ids
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, {"type": "video_url", "video_url": {"url": "file:///etc/hostname"}}, QUESTION)
    assert caught.value.code == "invalid_image_url"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_video_costs_one_request(server: Server, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, video(BROKEN[name]), QUESTION)
    assert caught.value.code in ("invalid_video", "unsupported_video_format")
    assert caught.value.param == "messages[0].content[0].video_url.url"
    assert ask(server, video(SERVED["h264"]), QUESTION).choices[0].token_ids


def test_too_many_videos_are_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, *[video(SERVED["h264"])] * 5)
    assert caught.value.code == "too_many_images"
