"""The images of a prompt in the usage of its answer, in every API: the size that the model saw, tokens, cached or not."""

from typing import Any

import anthropic
import chats
import scripted
from chats import data_url, random_image
from tables import table

from saccade.gateway.output.answer import ImageUsage
from saccade.models import load_layout, load_video_layout
from saccade.models.family import VideoOptions
from saccade.protocol.media import Span, VideoHeader

URLS = [data_url(random_image(70, 40, 1)), data_url(random_image(640, 320, 2))]
SIZES = [{"width": 96, "height": 64, "patch": 16}, {"width": 640, "height": 320, "patch": 16}]


def chat_usage(gateway: scripted.Gateway, stream: bool) -> Any:
    """Return the usage of a chat with the two images, as the client's types have it."""
    parts: Any = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    with gateway.client() as client:
        if not stream:
            return client.chat.completions.create(**asked).usage.prompt_tokens_details.to_dict()
        *_, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        return last.usage.prompt_tokens_details.to_dict()


def response_usage(gateway: scripted.Gateway, stream: bool) -> Any:
    parts: Any = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in URLS]
    asked: Any = {"model": "tiny", "input": [{"role": "user", "content": parts}]}
    with gateway.client() as client:
        if not stream:
            return client.responses.create(**asked).usage.input_tokens_details.to_dict()
        with client.responses.stream(**asked) as events:
            return events.get_final_response().usage.input_tokens_details.to_dict()


def message_usage(gateway: scripted.Gateway, stream: bool) -> Any:
    sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in URLS]
    parts: Any = [{"type": "image", "source": source} for source in sources]
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": parts}]}
    with chats.anthropic_client(f"http://127.0.0.1:{gateway.port}") as client:
        message: anthropic.types.Message
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
    usage: Any = message.usage.to_dict()
    return {"cached_tokens": usage["cache_read_input_tokens"], **usage["input_tokens_details"]}


@table("stream", [False, True])
@table("usage_of", [chat_usage, response_usage, message_usage])
def test_images_are_in_the_usage_of_every_api(usage_of: Any, stream: bool, gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("two")
    usage_of(gateway, stream)
    (first,), (second,) = (item.spans for item in gateway.worker.requests[-1].media)
    entries = [{**size, "tokens": span.length} for size, span in zip(SIZES, (first, second), strict=True)]
    assert [entry["tokens"] for entry in entries] == [6, 200]
    for num_cached, expected in (
        (first.start + first.length - 1, entries),
        (first.start + first.length, [{**entries[0], "cached": True}, entries[1]]),
    ):
        gateway.answer_pieces("two", num_cached_tokens=num_cached)
        usage = usage_of(gateway, stream)
        usage.pop("cache_write_tokens", None)
        assert usage == {"cached_tokens": num_cached, "image_tokens": 206, "video_tokens": 0, "images": expected}


def test_usage_without_images_has_no_fields_of_images(gateway: scripted.Gateway) -> None:
    gateway.answer_pieces("none", num_cached_tokens=3)
    assert gateway.chat().json["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_entry_of_a_video_has_its_frames() -> None:
    videos = load_video_layout("qwen3_vl")({}, {}, {})
    layout = videos.video(VideoHeader(48, 24.0, 320, 240), videos.settings_for(VideoOptions()))
    entry = ImageUsage.of_layout(layout, [Span(1, layout.num_tokens // 2), Span(90, layout.num_tokens // 2)], 0)
    assert (entry.frames, entry.tokens) == (len(layout.frames), layout.num_tokens)
    assert (entry.width, entry.height) == (entry.patch * layout.grid[2], entry.patch * layout.grid[1])


def test_entry_of_tiles_has_the_size_of_all() -> None:
    pinpoints: dict[str, Any] = {"model_type": "llava_next", "image_grid_pinpoints": [[336, 672], [672, 336]]}
    edges = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    layouts = load_layout("llava")(
        {"vision_config": {"image_size": 336, "patch_size": 14}, **pinpoints}, {**pinpoints, **edges}
    )
    layout = layouts.image(300, 900, layouts.settings)
    entry = ImageUsage.of_layout(layout, [Span(0, layout.num_tokens)], 0)
    assert (entry.width, entry.height, entry.patch) == (336, 672, 14)
