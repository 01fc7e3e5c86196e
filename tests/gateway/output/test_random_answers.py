"""Answers of texts, reasoning, calls, mentions and cuts in any order are the same in every delta. # F13"""

import random
from collections.abc import Callable

import pytest
from tables import table
from written_answers import FORMS, Form, ids_of, read

from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.output import FinishReason

NUM_ANSWERS = 40
"""Of each form."""

VALUES = ("a b", "", "\n", "é你😀", '"quoted" \\ {x} [y]', "a < b </b>", "</parameter>", "</function>", "3", "null")
TEXTS = ("I look. ", "\n\n", " and ", "STOP", "`", "é你😀", "<b>", "<", "{", '{"name": "look"', "<function=", "Done.")


def call(form: Form, draw: random.Random) -> str:
    """A call, whole or damaged: of a function that is declared or not, with tags in its values, cut, without a tag."""
    values = [
        *VALUES,
        *form.tags,
        form.end_of_thought,
        f"x{form.tags[0]}y{form.tags[1]}z",
        form.write("look", {"count": 1}),
    ]
    arguments = {"text": draw.choice(values), "count": draw.randrange(9), "list": [draw.choice(VALUES)]}
    kept = {key: value for key, value in arguments.items() if draw.random() < 0.7}
    written = form.write(draw.choice(["look", "look", "look_far", "book"]), kept)
    match draw.randrange(8):
        case 0:
            return written[: draw.randrange(len(written))]
        case 1:
            return written.replace(draw.choice(form.end_tags), "", 1)
        case 2:
            return written.removeprefix(form.tags[0])
        case 3:
            return form.section[0] + written + draw.choice(["", form.section[1]])
    return written


def answer(form: Form, draw: random.Random) -> str:
    """An answer of any pieces, of which reasoning is likely to be the first."""
    pieces = [draw.choice([form.thinks, "", ""])]
    for _ in range(draw.randrange(1, 9)):
        kind = draw.randrange(6)
        if kind < 2:
            pieces.append(call(form, draw))
        elif kind < 4:
            pieces.append(draw.choice(TEXTS))
        else:
            pieces.append(draw.choice([*form.tags, *form.end_tags, *form.section, form.end_of_thought, form.thinks]))
    return "".join(pieces)


@pytest.mark.ci
@table("name", FORMS)
def test_any_answer_is_the_same_in_every_delta(name: str, models: Callable[[str], ServedModel]) -> None:
    model, form, draw = models(name), FORMS[name], random.Random(f"answers of {name}")
    num_calls = 0
    for _ in range(NUM_ANSWERS):
        text = answer(form, draw)
        finish = draw.choice([FinishReason.STOP, FinishReason.LENGTH])
        many = draw.random() < 0.8
        seen = read(model, text, finish=finish, stop=draw.choice([None, "STOP", ". "]), parallel_tool_calls=many)
        num_calls += len(seen.calls)
        assert seen.num_tokens <= len(ids_of(model, text))
        assert many or len(seen.calls) <= 1
        for called, _ in seen.calls:
            assert called in ("look", "look_far")
    assert num_calls > NUM_ANSWERS / 4


@table("name", FORMS)
def test_an_answer_without_calls_loses_no_text(name: str, models: Callable[[str], ServedModel]) -> None:
    model, form, draw = models(name), FORMS[name], random.Random(f"texts of {name}")
    for _ in range(NUM_ANSWERS):
        text = "".join(draw.choice([*TEXTS, *form.tags, "x"]) for _ in range(draw.randrange(1, 12)))
        if name == "kimi_k2" and "".join(form.tags) in "".join(text.split()):
            continue  # An empty pair of Kimi's tags is left out.
        seen = read(model, text, skip_special_tokens=False)
        assert (seen.content, seen.calls) == (text.strip(), [])
        assert seen.num_tokens == len(ids_of(model, text))
