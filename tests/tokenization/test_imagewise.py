"""Phi-3-vision: every stretch of text between images is tokenised by itself."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tables import table
from tokenizer_needs import PHI3_TAG

from saccade.tokenization.chat_template import ChatTemplate
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.imagewise import ImagewiseTokenizer
from saccade.tokenization.tokenizer import Segment

IMAGE = {"type": "image"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def segments(prompt: str) -> list[Segment]:
    """Take everything that looks special for the template's."""
    parts = re.split(r"(<\|\w+\|>)", prompt)
    return [Segment(part, position % 2 == 1) for position, part in enumerate(parts) if part]


@pytest.fixture(scope="module")
def phi3(tokenizer_of: Callable[[str], Any]) -> ImagewiseTokenizer:
    return tokenizer_of("phi3_v")


@pytest.fixture(scope="module")
def changed(checkpoint: Callable[[str], Path]) -> Callable[..., ImagewiseTokenizer]:
    """The tokenizer with other flags of its special tokens, or other settings."""

    def made(rstrip: bool = True, **settings: Any) -> ImagewiseTokenizer:
        parsed = json.loads((checkpoint("phi3_v") / "tokenizer.json").read_text())
        for token in parsed["added_tokens"]:
            token["rstrip"] = token["rstrip"] and rstrip
        given = json.loads((checkpoint("phi3_v") / "tokenizer_config.json").read_text()) | settings
        return ImagewiseTokenizer(json.dumps(parsed).encode(), given, PHI3_TAG, "<|image|>")

    return made


def stretches(tokenizer: Any, prompt: str, placeholder: int) -> list[int]:
    """What the release's processing_phi3_v.py does, an image as one placeholder."""
    first, *others = [tokenizer(stretch)["input_ids"] for stretch in re.split(r"<\|image_\d+\|>", prompt)]
    return first + [token_id for stretch in others for token_id in (placeholder, *stretch)]


CHATS: Sequence[Sequence[dict[str, Any]]] = (
    [user(text("no image"))],
    [user(IMAGE, text("What is it?"))],
    [user(text("word."), IMAGE)],
    [user(text("word."), IMAGE, text("word"), IMAGE, IMAGE, text(" \n"))],
    [{"role": "system", "content": "Be brief."}, user(IMAGE, text("\n\n x "))],
    [user(IMAGE, text("A")), {"role": "assistant", "content": "B"}, user(text("C"), IMAGE)],
    [user(text("")), {"role": "assistant", "content": "你好 é"}, user(text("  "), IMAGE, text("<|imag_1|>"))],
)


@table("chat", CHATS)
def test_ids_equal_the_reference(
    chat: Any, phi3: ImagewiseTokenizer, template_of: Callable[[str], ChatTemplate], reference_of: Any
) -> None:  # E1 E4
    rendered = template_of("phi3_v").render(chat)
    prompt = "".join(segment.text for segment in rendered)
    assert phi3.encode(rendered) == stretches(reference_of("phi3_v"), prompt, phi3.special_tokens["<|image|>"])


def test_images_are_numbered_through_the_chat(template_of: Callable[[str], ChatTemplate]) -> None:  # F1
    chat = [user(text("a"), IMAGE), {"role": "assistant", "content": "b"}, user(IMAGE, text("c"), IMAGE)]
    rendered = template_of("phi3_v").render(chat)
    tags = [segment.text for segment in rendered if segment.is_special and "image" in segment.text]
    assert tags == ["<|image_1|>", "<|image_2|>", "<|image_3|>"]
    prompt = "".join(segment.text for segment in rendered)
    assert "a<|image_1|>\n<|end|>" in prompt
    assert "<|image_2|>\nc<|image_3|>\n" in prompt


def test_typed_tags_are_text(phi3: ImagewiseTokenizer, template_of: Callable[[str], ChatTemplate]) -> None:  # F2
    rendered = template_of("phi3_v").render([user(text("<|image_1|><|image_"), IMAGE, text("2|>"))])
    assert [segment.text for segment in rendered if segment.is_special].count("<|image_1|>") == 1
    assert phi3.encode(rendered).count(phi3.special_tokens["<|image|>"]) == 1


@pytest.mark.parametrize(
    "prompt", ["word.<|image_1|>", "<|user|>\n", "<|user|>\n<|image_1|>\nWhat?<|end|>\n<|assistant|>\n"]
)
def test_white_space_is_swallowed_as_by_the_reference(
    prompt: str, phi3: ImagewiseTokenizer, reference_of: Any
) -> None:  # E4
    placeholder = phi3.special_tokens["<|image|>"]
    expected = stretches(reference_of("phi3_v"), prompt, placeholder)
    assert phi3.encode(segments(prompt)) == expected
    assert expected[0] == 1
    assert expected.count(1) == 1 + expected.count(placeholder)


def test_white_space_stays_after_tokens_that_swallow_nothing(
    changed: Callable[..., ImagewiseTokenizer],
) -> None:  # E4
    tokenizer = changed(rstrip=False)
    given = segments("<|user|>\n<|image_1|>")
    assert tokenizer.decode(tokenizer.encode(given)) == "<s><|user|> \n<|image|><s>"


@pytest.mark.parametrize("prompt", ["word.<|image_1|>", "<|user|>\n"])
def test_no_bos_where_the_settings_say_so(prompt: str, changed: Callable[..., ImagewiseTokenizer]) -> None:  # E4
    tokenizer = changed(add_bos_token=False)
    assert 1 not in tokenizer.encode(segments(prompt))


def as_vllm(tokenizer: Any, prompt: str, placeholder: int) -> list[int]:
    """What vLLM makes of a chat: Phi3VMultiModalProcessor._apply_prompt_updates of 0.32, with transformers' tokenizer."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not re.search(r"<\|image_\d+\|>", prompt):
        return ids
    whole = tokenizer.decode(ids[1:] if ids[0] == tokenizer.bos_token_id else ids)
    for token in tokenizer.all_special_tokens:
        whole = whole.replace(f"{token} ", token)
    return stretches(tokenizer, whole, placeholder)


@table("chat", CHATS)
def test_chats_over_vllm(
    chat: Any, phi3: ImagewiseTokenizer, template_of: Callable[[str], ChatTemplate], reference_of: Any
) -> None:  # E1 E4
    rendered = template_of("phi3_v").render(chat)
    prompt = "".join(segment.text for segment in rendered)
    placeholder = phi3.special_tokens["<|image|>"]
    assert phi3.encode_as_vllm_chat(rendered) == as_vllm(reference_of("phi3_v"), prompt, placeholder)


@table(
    "prompt",
    [
        "word.<|image_1|>",
        "<|user|>\n",
        "<|user|>\n<|image_1|>\nWhat?<|end|>\n<|assistant|>\n",
        "<|user|>\n word <|image_1|>\n<|end|>  x<|image_2|>",
        "<s><|user|>\n<|image_1|>",
        "<|image_1|>",
    ],
)
def test_white_space_and_bos_of_chats_over_vllm(prompt: str, phi3: ImagewiseTokenizer, reference_of: Any) -> None:  # E4
    placeholder = phi3.special_tokens["<|image|>"]
    ids = phi3.encode_as_vllm_chat(segments(prompt))
    assert ids == as_vllm(reference_of("phi3_v"), prompt, placeholder)
    assert ids[:2].count(1) == ("<|image" in prompt)


def test_vllm_adds_no_bos_to_a_chat_without_images(phi3: ImagewiseTokenizer) -> None:  # E4
    given = segments("<|user|>\nx<|end|>\n")
    assert [1, *phi3.encode_as_vllm_chat(given)] == phi3.encode(given)


def test_chats_over_vllm_without_bos(changed: Callable[..., ImagewiseTokenizer]) -> None:  # E4
    tokenizer = changed(add_bos_token=False)
    assert 1 not in tokenizer.encode_as_vllm_chat(segments("word.<|image_1|>"))


def test_image_tags() -> None:
    tag = ImageTag("<|image_{number}|>\n")
    assert tag.write_tag(12) == "<|image_12|>\n"
    assert tag.pattern.findall("<|image_12|> <|image_|> <|image_1|>") == ["<|image_12|>", "<|image_1|>"]
    assert tag.fixed == "<|image_|>"
