"""Videos in messages, and what a request says of their frames."""

from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidImageUrl, InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.image_source import ImageSource
from saccade.gateway.prompt.media_options import read_media_options
from saccade.gateway.prompt.messages import read_chat
from saccade.models.family import Family, FrameTimes, ImageOptions, VideoOptions

FAMILY = Family(architectures=("A",), placeholder="<image>", video_placeholder="<video>")
TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image_url", "image_url": {"url": "p"}}


def video(url: Any = "v", **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": url, **more}


def read(*parts: dict[str, Any], **fields: Any) -> Chat:
    content = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}
    return read_chat(msgspec.json.decode(msgspec.json.encode(content), type=ChatRequest), FAMILY)


def refused(kind: type[RequestError], field: str, *parts: dict[str, Any], **fields: Any) -> None:
    with pytest.raises(kind) as caught:
        read(*parts, **fields)
    assert caught.value.param == field


def test_videos_and_images_stand_in_their_order() -> None:
    chat = read(TEXT, video({"url": "v"}), IMAGE, video())
    assert [part["type"] for part in chat.messages[0]["content"]] == ["text", "video", "image", "video"]
    assert chat.images == [
        ImageSource("messages[0].content[1].video_url.url", "v", VideoOptions()),
        ImageSource("messages[0].content[2].image_url.url", "p", ImageOptions()),
        ImageSource("messages[0].content[3].video_url", "v", VideoOptions()),
    ]


@table(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, {"num_frames": 8}),
        (
            {"media_io_kwargs": {"video": {"fps": 0.5, "num_frames": -1}, "image": {}}},
            {"fps": 0.5, "times": FrameTimes(fps=0.5)},
        ),
        ({"media_io_kwargs": {"video": None, "image": None}}, {}),
        ({"mm_processor_kwargs": {"fps": 4}}, {"fps": 4}),
        ({"mm_processor_kwargs": {"num_frames": 6, "max_pixels": 9}}, {"num_frames": 6, "max_pixels": 9}),
        ({"mm_processor_kwargs": {"size": {"shortest_edge": 4}}}, {"min_pixels": 4}),
        (
            {"media_io_kwargs": {"video": {"fps": 30, "frames_indices": [0, 9], "total_num_frames": 12}}},
            {"fps": 30, "times": FrameTimes((0, 9), 12, 30)},
        ),
        ({"media_io_kwargs": {"video": {"frames_indices": None}}, "mm_processor_kwargs": {"fps": 4}}, {"fps": 4}),
    ],
)
def test_options_of_the_request_are_read(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    (source,) = read(video(), **fields).images
    assert source.options == VideoOptions(**expected)


@table("value", [0, -2, 1.5, "8", True, 2**20 + 1])
def test_numbers_of_frames_are_checked(value: Any) -> None:
    for fields in (
        {"media_io_kwargs": {"video": {"num_frames": value}}},
        {"mm_processor_kwargs": {"num_frames": value}},
    ):
        (path,) = fields
        field = "media_io_kwargs.video.num_frames" if path == "media_io_kwargs" else "mm_processor_kwargs.num_frames"
        refused(InvalidValue, field, video(), **fields)


@table("value", [0, -0.5, "2", True, 1001, float("inf"), float("nan")])
def test_rates_are_checked(value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_media_options(None, {"video": {"fps": value}})
    assert caught.value.param == "media_io_kwargs.video.fps"


@table(
    ("given", "kind", "field"),
    [
        ({"video": {"backend": "opencv"}}, UnsupportedParameter, "media_io_kwargs.video.backend"),
        ({"image": {"num_frames": 2}}, UnsupportedParameter, "media_io_kwargs.image.num_frames"),
        ({"audio": {}}, UnsupportedParameter, "media_io_kwargs.audio"),
        ({"video": [8]}, InvalidValue, "media_io_kwargs.video"),
        ({"x" * 100: 1}, UnsupportedParameter, "media_io_kwargs." + "x" * 64 + "…"),
        ({"video": {"fps": 1, "num_frames": 4}}, InvalidValue, "media_io_kwargs.video.num_frames"),
        ({"video": {"frames_indices": [0, -1]}}, InvalidValue, "media_io_kwargs.video.frames_indices"),
        ({"video": {"frames_indices": {"0": 1}}}, InvalidValue, "media_io_kwargs.video.frames_indices"),
        ({"video": {"total_num_frames": 0}}, InvalidValue, "media_io_kwargs.video.total_num_frames"),
    ],
)
def test_other_ways_to_read_media_are_refused(given: Any, kind: type[RequestError], field: str) -> None:
    refused(kind, field, video(), media_io_kwargs=given)


def test_one_field_says_the_frames() -> None:
    fields = {"mm_processor_kwargs": {"fps": 1}, "media_io_kwargs": {"video": {"num_frames": 4}}}
    refused(InvalidValue, "mm_processor_kwargs.fps", video(), **fields)


def test_wrong_parts_name_their_field() -> None:
    refused(InvalidValue, "messages[0].content[0].video_url", video(None))
    refused(InvalidImageUrl, "messages[0].content[0].video_url", video(""))
    refused(InvalidImageUrl, "messages[0].content[0].video_url.url", video({"url": ""}))
    refused(InvalidValue, "messages[0].content[0].image_url", video(image_url="p"))
    refused(InvalidValue, "messages[0].content[0].video_url", {**IMAGE, "video_url": "v"})
    refused(InvalidValue, "messages[0].content[0].video_url", {**TEXT, "video_url": "v"})
    refused(UnsupportedParameter, "messages[0].content[0].audio", video(audio={"url": "a"}))
