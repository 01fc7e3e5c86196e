"""What the result of a chat is in a program and in a notebook."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import msgspec
import pydantic
import pytest
from PIL import Image
from tables import table

from saccade.errors import InvalidImage
from saccade.llm.notebook import MAX_IMAGES, SIDE
from saccade.llm.results import ChatResult


class Model(pydantic.BaseModel):
    """A class of pydantic."""

    colour: str


@dataclass
class Plain:
    """A class of the standard library."""

    colour: str


class Struct(msgspec.Struct):
    """A class of msgspec."""

    colour: str


class Typed(TypedDict):
    """A dict with known keys."""

    colour: str


@table("kind", [Model, Plain, Struct, Typed])
def test_parsed_answer_is_an_object_of_the_class(kind: type) -> None:
    assert ChatResult(text='{"colour": "red"}', kind=kind).parsed == kind(colour="red")
    for text in ('{"colour": "re', '{"color": "red"}'):
        with pytest.raises(ValueError):  # noqa: PT011
            _ = ChatResult(text=text, kind=kind).parsed


def test_parsed_answer_without_a_class_is_a_value() -> None:
    assert ChatResult(text="[1]").parsed == [1]


def test_notebook_shows_text_and_no_html_of_the_model() -> None:
    shown = ChatResult(text="<b>5 < 6</b>", reasoning="<i>", seconds=1.5).to_html()
    assert "&lt;b&gt;5 &lt; 6&lt;/b&gt;" in shown
    assert "<summary>reasoning</summary>" in shown
    assert "<i>" not in shown
    assert "<small>1.50 s</small>" in shown


def test_notebook_shows_the_images_of_the_question(tmp_path: Path) -> None:
    large = Image.new("RGB", (1600, 800), (200, 0, 0))
    (tmp_path / "damaged.png").write_text("no image")
    shown = ChatResult(text="red", images=(large, tmp_path / "damaged.png", *[large] * 8)).to_html()
    urls = re.findall('src="data:image/png;base64,(.*?)"', shown)
    assert len(urls) == MAX_IMAGES - 1
    assert "and 2 more" in shown
    assert Image.open(io.BytesIO(base64.b64decode(urls[0]))).size == (SIDE, SIDE // 2)


def test_a_result_in_a_program_shows_no_bytes_of_images() -> None:
    assert "images" not in repr(ChatResult(text="red", images=(b"a file",)))


def test_notebook_shows_the_error() -> None:
    shown = ChatResult(error=InvalidImage("No <image>.")).to_html()
    assert shown == "<p><b>InvalidImage</b>: No &lt;image&gt;.</p>"
