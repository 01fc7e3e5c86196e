"""Numbers in text of others are bounded before they are read."""

from tables import table

from saccade.whole_numbers import read_port, read_whole_number

NO_NUMBERS = ("", " 1", "1 ", "+1", "-1", "1_0", "1.0", "0x1", "1e3", "²", "٣", "one", "\n1", "1\n")


@table(
    ("text", "number"),
    [("0", 0), ("7", 7), ("99", 99), ("100", None), ("007", 7), ("0" * 5000 + "42", 42), ("0" * 5000, 0), ("9" * 5000, None)],
    ["zero", "seven", "most", "over", "zeros before", "5,000 zeros before", "5,000 zeros", "5,000 nines"],
)  # fmt: skip
def test_whole_numbers_are_read_up_to_their_most(text: str, number: int | None) -> None:
    assert read_whole_number(text, 99) == number
    assert read_whole_number(text.encode(), 99) == number


@table("text", NO_NUMBERS)
def test_other_texts_are_no_whole_numbers(text: str) -> None:
    assert read_whole_number(text, 99) is None
    assert read_whole_number(text.encode(), 99) is None
    assert read_port(text) is None


@table(("text", "port"), [("0", 0), ("80", 80), ("65535", 65535), ("65536", None), ("00080", 80), ("000080", None)])
def test_ports_have_five_digits(text: str, port: int | None) -> None:
    assert read_port(text) == port
