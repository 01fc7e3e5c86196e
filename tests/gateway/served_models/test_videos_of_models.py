"""What stands for a video in a model's prompt, from the family's declaration to token ids. A1 F1"""

from collections.abc import Callable
from pathlib import Path

import pytest

from saccade import models
from saccade.errors import InvalidValue
from saccade.gateway.prompt.placeholders import expand, write_images
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.family import VideoOptions
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles
from saccade.protocol.media import VideoHeader

WITH_VIDEOS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "kimi_k25",
    "glm4v",
    "glm_ocr",
    "internvl",
    "gemma4",
    "gemma4_unified",
)
HEADER = VideoHeader(9, 3.0, 150, 100)
TEXT = {"type": "text", "text": "<|video_pad|><|video|><|kimi_k25_video_placeholder|>"}


def served(folder: Path, **changed: bytes) -> ServedModel:
    given = read_model_files(folder)
    replaced = {name.replace("__", "."): content for name, content in changed.items()}
    return ServedModel.from_files("m", ModelFiles(files={**given.files, **replaced}), 32768)


def test_declarations_agree_with_the_parts_for_videos() -> None:
    families = models.families()
    assert {name for name in families if models.takes_videos(name)} == set(WITH_VIDEOS)
    assert {name for name, family in families.items() if family.video_placeholder} == set(WITH_VIDEOS)


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_a_video_and_an_image_have_room_in_their_order(name: str, checkpoint: Callable[[str], Path]) -> None:
    model = served(checkpoint(name))
    assert model.videos is not None
    video = model.videos.layout.video(HEADER, model.videos.layout.settings)
    image = model.layout.image(150, 100, model.layout.settings)
    special = model.tokenizer.special_tokens
    for kinds, layouts in ((("video", "image"), [video, image]), (("image", "video"), [image, video])):
        content = [TEXT, *({"type": kind} for kind in kinds), TEXT]
        segments = model.template.render([{"role": "user", "content": content}])
        written = write_images(segments, special, model.placeholders, layouts)
        token_ids, spans = expand(model.tokenizer.encode(written), model.placeholders, layouts)
        for layout, of_item in zip(layouts, spans, strict=True):
            assert sum(span.length for span in of_item) == layout.num_tokens
            for span in of_item:
                ids = token_ids[span.start : span.start + span.length]
                assert set(ids) == {model.placeholders.id_of(layout)}
        # Text of a user stays text, whatever it looks like.
        assert sum(token_id in model.placeholders.ids for token_id in token_ids) == sum(
            layout.num_tokens for layout in layouts
        )
        shown = model.tokenizer.decode(token_ids)
        assert shown.count(TEXT["text"]) == 2
        assert all(piece in shown for piece in video.prompt if isinstance(piece, str))
        with pytest.raises(InvalidValue):
            list(write_images(segments, special, model.placeholders, layouts[::-1]))


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_frames_are_a_number_or_those_that_a_client_sends(name: str, checkpoint: Callable[[str], Path]) -> None:
    """A number needs no rate. Frames with their times are the same video as those that the gateway samples itself."""
    model = served(checkpoint(name))
    assert model.videos is not None
    layout = model.videos.layout
    settings = layout.settings_for(VideoOptions(num_frames=4))
    sampled = layout.video(VideoHeader(24, 3.0, 150, 100), settings)
    assert len(sampled.frames) == 4
    assert layout.video(VideoHeader(24, 3.0, 150, 100, sampled.frames), layout.settings) == sampled
    moved = layout.video(
        VideoHeader(240, 3.0, 150, 100, tuple(30 + 9 * one for one in sampled.frames)), layout.settings
    )
    has_times = any(letter.isdigit() for piece in sampled.prompt if isinstance(piece, str) for letter in piece)
    assert (moved.prompt != sampled.prompt) == (has_times and name != "internvl"), "it numbers frames"


def test_a_template_without_videos_refuses_them(checkpoint: Callable[[str], Path]) -> None:
    template = b"{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% endif %}{% endfor %}{% endfor %}"
    assert served(checkpoint("qwen2_vl"), chat_template__jinja=template).videos is None


def test_videos_have_a_fingerprint_of_their_own(checkpoint: Callable[[str], Path]) -> None:
    model = served(checkpoint("qwen2_vl"))
    assert model.videos is not None
    settings = model.videos.layout.settings
    assert model.video_fingerprint(settings) != model.fingerprint(settings)
    assert model.video_fingerprint({**settings, "fps": 1.0}) != model.video_fingerprint(settings)


LIMITS = {"resized_height": 96, "resized_width": 64}, {"max_frames": 4}, {"min_frames": 8}, {"total_pixels": 8192}


@pytest.mark.parametrize("name", WITH_VIDEOS)
def test_limits_change_a_video_or_are_refused(name: str, checkpoint: Callable[[str], Path]) -> None:
    model, header = served(checkpoint(name)), VideoHeader(24, 8.0, 640, 480)
    assert model.videos is not None
    layout, params = model.videos.layout, list[str | None]()
    for given in LIMITS:
        try:
            settings = layout.settings_for(VideoOptions(**given))
        except InvalidValue as refusal:
            params.append(refusal.param)
            continue
        assert settings != layout.settings
        limited = layout.video(header, settings)
        assert limited.num_tokens != layout.video(header, layout.settings).num_tokens
    assert {*params} <= {f"mm_processor_kwargs.{next(iter(given))}" for given in LIMITS}
