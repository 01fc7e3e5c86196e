"""What the result of a chat is in a program and in a notebook."""

from dataclasses import dataclass
from typing import TypedDict

import msgspec
import pydantic
import pytest
from tables import table

from saccade.errors import InvalidImage
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


def test_notebook_shows_the_error() -> None:
    shown = ChatResult(error=InvalidImage("No <image>.")).to_html()
    assert shown == "<p><b>InvalidImage</b>: No &lt;image&gt;.</p>"
