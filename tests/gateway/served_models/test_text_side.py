"""Tokenizer, template and placeholder of a checkpoint agree about images, or the model is not served."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints.kimi_k25 import PATTERN

from saccade.errors import StartupError
from saccade.gateway.served_models.served_model import PROBE, text_side
from saccade.models.family import Family
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles

LLAVA = Family(("x",), "<image>", ("image_token_index",))
KIMI = Family(("x",), "<|media_pad|>", ("media_placeholder_token_id",), tiktoken_pattern=PATTERN)
PHI3 = Family(("x",), "<|image|>", (), image_tag="<|image_{number}|>\n", split_at_images=True)
STRINGS = b"{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"


def changed(files: ModelFiles, **contents: bytes) -> ModelFiles:
    return ModelFiles(files={**files.files, **{name.replace("__", "."): content for name, content in contents.items()}})


@pytest.mark.parametrize(
    ("name", "family", "contents", "prompt"),
    [
        ("llava", LLAVA, {}, "USER: <image>\nWhat is it? ASSISTANT:"),
        ("llava", LLAVA, {"chat_template__jinja": STRINGS}, "<image>\nWhat is it?</s>"),
        ("phi3_v", PHI3, {}, "<|user|>\n<|image_1|>\nWhat is it?<|end|>\n<|assistant|>\n"),
        (
            "kimi_k25",
            KIMI,
            {},
            "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
            "What is it?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
        ),
    ],
)
def test_one_image_is_one_placeholder(
    name: str, family: Family, contents: dict[str, bytes], prompt: str, checkpoint: Callable[[str], Path]
) -> None:  # A9 F1
    text = text_side(family, {}, changed(read_model_files(checkpoint(name)), **contents))
    segments = text.template.render(PROBE)
    assert "".join(segment.text for segment in segments) == prompt
    assert text.tokenizer.encode(segments).count(text.placeholder_token_id) == 1


@pytest.mark.parametrize(
    ("family", "config", "sentence"),
    [
        (LLAVA, {"image_token_index": 99999}, "image_token_index.*99999.*<image>"),
        (Family(("x",), "<pic>", ("a", "b")), {}, "none of a, b.*<pic>"),
        (Family(("x",), "<pic>", ()), {}, "no token <pic>"),
        (Family(("x",), "<pad>", ()), {}, "one placeholder for one image"),
        (KIMI, {"media_placeholder_token_id": 0}, "one placeholder for one image"),
    ],
)
def test_unresolved_settings_are_named(
    family: Family, config: dict[str, Any], sentence: str, checkpoint: Callable[[str], Path]
) -> None:  # A9
    with pytest.raises(StartupError, match=sentence):
        text_side(family, config, changed(read_model_files(checkpoint("llava")), chat_template__jinja=b"{{ 1 }}"))
