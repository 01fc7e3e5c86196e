"""Long texts are disguised piece by piece, with the same result."""

from typing import Any

from saccade.tokenization.provenance import PIECE, TANGUT, Provenance


class Whole(str):
    """A text that no single call may change, since that would hold the interpreter's lock all along."""

    def replace(self, *_: Any, **__: Any) -> str:
        raise AssertionError("changed as a whole")


def test_no_other_thread_waits_for_a_long_text() -> None:
    text = Whole(("x" * 100 + "<end>") * (PIECE // 20))
    begin, middle, end = Provenance(["<begin>", "<end>"]).split(lambda written: f"<begin>{written(text)}<end>")
    assert [begin, end] == [("<begin>", True), ("<end>", True)]
    assert middle == (str(text), False)


def test_special_tokens_are_found_wherever_the_pieces_end() -> None:
    for shift in range(8):
        before, after = "<end>" + "a" * (PIECE - 8 + shift), "b<end>" * PIECE
        subject = Provenance(["<end>"])
        segments = subject.split(lambda written, parts=(before, after): f"{written(parts[0])}<end>{written(parts[1])}")
        assert [tuple(segment) for segment in segments] == [(before, False), ("<end>", True), (after, False)]


def test_text_in_the_script_of_the_disguise_stays_as_it_is() -> None:
    text = "".join(map(chr, TANGUT[:-64]))
    segments = Provenance(["<begin>", "<end>"]).split(lambda written: f"<begin>{written(text)}<end>")
    assert [tuple(segment) for segment in segments] == [("<begin>", True), (text, False), ("<end>", True)]
