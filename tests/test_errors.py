"""The exception tree is what the wire and HTTP rely on."""

from tables import table

from saccade import errors
from saccade.errors import InternalError, SaccadeError, from_code


def leaves(kind: type[SaccadeError]) -> list[type[SaccadeError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


NAMED = [kind for kind in leaves(SaccadeError) if not kind.__subclasses__()]


@table("kind", NAMED)
def test_code_crosses_a_process_border_and_comes_back(kind: type[SaccadeError]) -> None:
    error = from_code(kind.code, "What was wrong.", "messages[0]")
    assert type(error) is kind
    assert (error.message, error.param) == ("What was wrong.", "messages[0]")


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in NAMED]
    assert len(set(codes)) == len(codes)


def test_unknown_code_is_our_fault() -> None:
    assert type(from_code("no_such_code", "")) is InternalError


def test_text_of_another_process_is_cleaned() -> None:
    words = "a\x1b[31mb\r\nc" + "x" * 5000
    error = from_code("worker_failed", words, words)
    assert error.message.startswith("a [31mb  cxx")
    assert len(error.message) == 2000
    assert error.param == error.message


def test_docstring_lists_the_tree_of_errors() -> None:
    drawn = {line.split("─ ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "─ " in line}
    assert drawn == {kind.__name__ for kind in leaves(SaccadeError)} - {"SaccadeError"}
