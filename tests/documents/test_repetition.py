"""Answers that repeat themselves without end."""

from tables import table

from saccade.documents.repetition import MIN_CHARACTERS, repetition_start

ROW = "<tr><td>4</td><td></td></tr>"
LINE = "A line that is long, " * 20 + "\n"


@table(
    ("text", "rest"),
    [
        ("A page. " + "and on " * 400, "A page. and on"),
        ("A page. " + "and on " * 5000 + "an", "A page. and on"),  # cut off in a piece, and longer than the tail
        ("x" * 3000, "x"),
        ("Lines:\n" + LINE * 12, ("Lines:\n" + LINE).rstrip("\n")),
        ("Total\n" + "0" * (MIN_CHARACTERS - 10), None),  # no longer than the rule of a table
        ("<table>" + ROW * 60 + "</table>", None),  # it ends
        ("".join(f"{number}. A line. " for number in range(1000)), None),
        ("", None),
    ],
)
def test_the_first_of_equal_pieces_is_kept(text: str, rest: str | None) -> None:
    start = repetition_start(text)
    assert (None if start is None else text[:start]) == rest
