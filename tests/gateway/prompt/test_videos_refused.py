"""Where videos are refused by name: models of images, and workers whose wires have none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.errors import TooManyImages, UnsupportedParameter
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.encoded_image import EncodedImage
from saccade.gateway.images.prompt_images import PromptImages
from saccade.gateway.prompt.chat_prompt import why_not_as_chat
from saccade.gateway.prompt.prompt_builder import PromptBuilder
from saccade.gateway.request import Limits
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import MediaLimits
from saccade.models.files import read_model_files
from saccade.protocol.media import VideoHeader
from saccade.telemetry import Metrics

IMAGE = ContentPart(type="image_url", image_url="data:image/png;base64,AAAA")
VIDEO = ContentPart(type="video_url", video_url="data:video/mp4;base64,AAAA")


def asked(*parts: ContentPart) -> ChatRequest:
    return ChatRequest(model="m", messages=[ChatMessage("user", list(parts))])


def prompts_of(config: GatewayConfig) -> PromptBuilder:
    return PromptBuilder(config.media_limits, Metrics(), WorkThreads(Limits.of_config(config).admission))


@pytest.fixture
async def prompts() -> PromptBuilder:
    return prompts_of(GatewayConfig())


@pytest.fixture
def model(checkpoint: Callable[[str], Path]) -> Callable[[str], ServedModel]:
    return lambda name: ServedModel.from_files("m", read_model_files(checkpoint(name)), 4096)


async def test_models_of_images_refuse_videos(prompts: PromptBuilder, model: Callable[[str], ServedModel]) -> None:
    with pytest.raises(UnsupportedParameter, match="no videos") as caught:
        prompts.read_chat(model("llava"), asked(ContentPart(type="text", text="a"), VIDEO))
    assert caught.value.param == "messages[0].content[1].video_url"


async def test_a_request_has_four_videos(prompts: PromptBuilder, model: Callable[[str], ServedModel]) -> None:
    served = model("qwen2_vl")
    assert len(prompts.read_chat(served, asked(*[VIDEO] * 4)).images) == 4
    with pytest.raises(TooManyImages, match="5 videos"):
        prompts.read_chat(served, asked(*[VIDEO] * 5))


async def test_images_and_videos_have_limits_of_their_own(model: Callable[[str], ServedModel]) -> None:
    """As with vLLM's --limit-mm-per-prompt."""
    served, prompts = model("qwen2_vl"), prompts_of(GatewayConfig(media_limits=MediaLimits(images=2, videos=1)))
    assert len(prompts.read_chat(served, asked(IMAGE, VIDEO, IMAGE)).images) == 3
    for parts, words in (([IMAGE] * 3, "3 images; at most 2"), ([IMAGE, VIDEO, VIDEO], "2 videos; at most 1")):
        with pytest.raises(TooManyImages, match=words):
            prompts.read_chat(served, asked(*parts))


async def test_workers_of_other_engines_take_no_videos(
    prompts: PromptBuilder, model: Callable[[str], ServedModel]
) -> None:
    served = model("qwen2_vl")
    assert served.videos is not None
    refusal = why_not_as_chat(served, prompts.read_chat(served, asked(VIDEO)), [])
    assert isinstance(refusal, UnsupportedParameter)
    header = VideoHeader(4, 2.0, 64, 64)
    settings = served.videos.layout.settings
    layout = served.videos.layout.video(header, settings)
    media = PromptImages((EncodedImage("a.video_url", b"", 4096, bytes(32), layout, settings, header),), ((),))
    assert media.on_wire(served.layout, "uint8").images == media.images
    with pytest.raises(UnsupportedParameter, match="no videos") as caught:
        media.on_wire(served.layout, "bfloat16")
    assert caught.value.param == "a.video_url"
