"""Marks of JSON are counted exactly, wherever they stand."""

import random

from tables import table

from saccade.json_counts import STRETCH_BYTES, num_marks


@table("share", [0.0, 0.0001, 0.01, 1.0])
def test_marks_are_counted_in_any_stretch(share: float) -> None:
    draw = random.Random(7)
    for length in (0, 1, STRETCH_BYTES - 1, STRETCH_BYTES, STRETCH_BYTES + 1, 5 * STRETCH_BYTES + 3):
        text = bytes(44 if draw.random() < share else 97 for _ in range(length))
        assert num_marks(text, b",") == text.count(b",")
