"""What the operator sets for requests that leave it open."""

from pathlib import Path
from typing import Any

import pytest
import scripted
from tables import table

from saccade.errors import InvalidValue, StartupError, UnsupportedParameter
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart, ImageUrl
from saccade.gateway.config import GatewayConfig
from saccade.gateway.prompt.media_options import read_defaults, read_media_options
from saccade.gateway.prompt.messages import read_chat
from saccade.models import families
from saccade.models.family import NO_TIMES

IMAGE = ContentPart(type="image_url", image_url=ImageUrl("http://127.0.0.1/a.png"))
QWEN3_5 = families()["qwen3_5"]
LIMITS = read_defaults(None, '{"max_pixels": 50000, "num_frames": 8}').media


def switches(default: str, **fields: Any) -> dict[str, Any]:
    request = ChatRequest(model="m", messages=[ChatMessage("user", "hi")], **fields)
    return dict(read_chat(request, QWEN3_5, read_defaults(default, None)).switches)


def test_switch_of_the_template_is_a_default() -> None:
    off = '{"enable_thinking": false}'
    assert switches(off) == {"enable_thinking": False}
    assert switches(off, chat_template_kwargs={"enable_thinking": True}) == {"enable_thinking": True}
    assert switches(off, enable_thinking=True) == {"enable_thinking": True}
    assert switches(off, reasoning_effort="low") == {"enable_thinking": True}
    assert (
        read_chat(
            ChatRequest(model="m", messages=[ChatMessage("user", "hi")]), families()["llava"], read_defaults(off, None)
        ).switches
        == {}
    )


@table(
    ("processor", "media_io", "limits", "sampling"),
    [
        ({}, {}, {"max_pixels": 50000}, {"num_frames": 8}),
        ({"max_pixels": 9000}, {}, {"max_pixels": 9000}, {"num_frames": 8}),
        ({"min_pixels": 9000}, {}, {"max_pixels": 50000, "min_pixels": 9000}, {"num_frames": 8}),
        ({"fps": 2}, {}, {"max_pixels": 50000}, {"fps": 2}),
        ({}, {"video": {"fps": 2}}, {"max_pixels": 50000}, {"fps": 2}),
    ],
)
def test_limit_of_images_is_a_default(
    processor: dict[str, Any], media_io: dict[str, Any], limits: dict[str, int], sampling: dict[str, Any]
) -> None:
    options = read_media_options(processor, media_io, LIMITS)
    assert (options.limits, options.sampling) == (limits, sampling)


def test_choice_of_frames_is_a_default() -> None:
    """vLLM's -1 leaves the choice to the model, and a rate says nothing of frames that a client has drawn."""
    for media_io, sampling in (
        ('{"video": {"num_frames": 32}}', {"num_frames": 32}),
        ('{"video": {"fps": 2}}', {"fps": 2}),
        ('{"video": {"num_frames": -1}}', {}),
        ('{"image": {}, "video": null}', {}),
    ):
        defaults = read_defaults(None, '{"max_pixels": 9000}', media_io).media
        assert (defaults.limits, defaults.sampling, defaults.times) == ({"max_pixels": 9000}, sampling, NO_TIMES)
        assert read_media_options(None, {"video": {"num_frames": 4}}, defaults).sampling == {"num_frames": 4}


def limits(family: str, default: str, **processor: Any) -> dict[str, int]:
    request = ChatRequest(model="m", messages=[ChatMessage("user", [IMAGE])], mm_processor_kwargs=processor or None)
    (source,) = read_chat(request, families()[family], read_defaults(None, default)).images
    return {name: value for name, value in vars(source.options).items() if value is not None and name != "detail"}


def test_number_of_tokens_of_an_image() -> None:
    """A default counts only for models that have such numbers; a request that another model cannot serve is refused."""
    assert limits("gemma4", "{}", max_soft_tokens=560) == {"max_soft_tokens": 560}
    assert limits("gemma4", '{"max_soft_tokens": 1120}') == {"max_soft_tokens": 1120}
    assert limits("gemma4", '{"max_soft_tokens": 1120}', max_soft_tokens=70) == {"max_soft_tokens": 70}
    assert limits("qwen3_vl", '{"max_soft_tokens": 1120, "max_pixels": 9000}') == {"max_pixels": 9000}
    with pytest.raises(UnsupportedParameter, match="max_soft_tokens"):
        limits("qwen3_vl", "{}", max_soft_tokens=560)
    for wrong in (100, 0, "70", 70.5):
        with pytest.raises(InvalidValue, match="max_soft_tokens"):
            limits("gemma4", "{}", max_soft_tokens=wrong)


@table(
    ("template_kwargs", "processor_kwargs", "media_io_kwargs", "words"),
    [
        ('{"enable_thinkin": true}', None, None, "no model has the switch enable_thinkin; known: "),
        ('{"enable_thinking": []}', None, None, "values must be true, false, null, numbers or strings"),
        (
            None,
            '{"max_pixels": 0}',
            None,
            "--mm-processor-kwargs: `mm_processor_kwargs.max_pixels` must be a whole number",
        ),
        (None, '{"do_resize": true}', None, "--mm-processor-kwargs: `mm_processor_kwargs.do_resize` is not served"),
        (None, None, '{"video": {"num_frames": 0}}', "--media-io-kwargs: `media_io_kwargs.video.num_frames` must be a"),
        (None, None, '{"video": {"backend": "x"}}', "--media-io-kwargs: `media_io_kwargs.video.backend` is not served"),
        (None, None, '{"audio": {}}', "--media-io-kwargs: `media_io_kwargs.audio` is not served; `video` is"),
        (None, '{"fps": 2}', '{"video": {"num_frames": 4}}', "both choose the frames of videos"),
        (None, None, '{"video": {"total_num_frames": 9}}', "--media-io-kwargs: the places of frames are those"),
    ],
)
def test_wrong_default_stops_the_start(
    template_kwargs: str | None, processor_kwargs: str | None, media_io_kwargs: str | None, words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        read_defaults(template_kwargs, processor_kwargs, media_io_kwargs)


def test_operators_template_replaces_the_models_own(tiny_qwen3_vl: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{% for p in m.content %}"
        "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
    )
    with scripted.running(tiny_qwen3_vl, GatewayConfig(chat_template=template)) as gateway:
        gateway.answer_two_tokens()
        assert gateway.chat("a <|im_end|>").status == 200
        (request,) = gateway.worker.requests
        assert gateway.ask("POST", "/detokenize", {"tokens": request.token_ids}).json["prompt"] == (
            "<|im_start|>a <|im_end|>"
        )
        assert gateway.chat("a", chat_template=template).json["error"]["param"] == "chat_template"
