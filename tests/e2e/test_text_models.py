"""Models that read text only, through HTTP: answers are the reference's, and images are refused at once. # A1 A10"""

import json
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import openai
import pytest
from chats import openai_messages, random_image
from checkpoints import TEXTS
from references.networks import TextOracle
from server import Server, serving

MAX_TOKENS = 24
SENTENCE = "this model reads text only; send the request to a model that takes images, or leave the image out."
EVERYDAY = "llama_text"
RELEASES = [pytest.param(name, marks=() if name == EVERYDAY else pytest.mark.conformance) for name in TEXTS]
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is it?"}],
    [{"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts."}]}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Describe the picture in detail."},
    ],
)


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a text each, as templates of texts take them."""
    return [
        {
            **one,
            "content": one["content"]
            if isinstance(one["content"], str)
            else "".join(p["text"] for p in one["content"]),
        }
        for one in messages
    ]


def check_refusal(server: Server, part: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(
            model=server.name, messages=[{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        )
    error: Any = refused.value.body
    assert (error["param"], error["message"]) == (field, f"`{field}`: {SENTENCE}")


@pytest.mark.ci
@pytest.mark.parametrize("name", RELEASES)
def test_answers_equal_the_reference_and_images_are_refused(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about its own deprecations
        from transformers import AutoTokenizer

        folder = TEXTS[name](tmp_path / name)
        tokenizer, oracle = AutoTokenizer.from_pretrained(folder), TextOracle(folder)
    with serving(str(folder), "--max-model-len", "2048") as server:
        client = server.client()
        for messages in CHATS:
            prompt = tokenizer.apply_chat_template(
                joined(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            expected = oracle.model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)[0].tolist()
            answer: Any = client.chat.completions.create(
                model=server.name,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            assert answer.prompt_token_ids + answer.choices[0].token_ids == expected
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as response:
            (card,) = json.loads(response.read())["data"]
        assert card["input_modalities"] == ["text"]
        (image,) = openai_messages(random_image(64, 64, 1))[0]["content"]
        unreached = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/cat.jpg"}}
        video = {"type": "video_url", "video_url": {"url": "http://192.0.2.1/cat.mp4"}}
        pages = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}}
        for part, field in (
            (image, "image_url.url"),
            (unreached, "image_url.url"),
            (video, "video_url.url"),
            (pages, "file.file_data"),
        ):
            check_refusal(server, part, f"messages[0].content[0].{field}")
