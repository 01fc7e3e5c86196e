"""Finds where an answer begins to repeat itself without end, as happens if a model loses its place on a page."""

MIN_CHARACTERS = 2000
MIN_REPEATS = 4
"""Repeats of this number and length are none of a page's own, such as the rules and empty cells of tables."""

TAIL_CHARACTERS = 8000


def repetition_start(text: str) -> int | None:
    """Return the index after the first of the equal pieces that *text* ends with; None if it does not end like that.

    repetition_start("A page. " + "and on " * 1000)  # 14: "A page. and on" is left
    """
    tail = text[: -TAIL_CHARACTERS - 1 : -1]
    # The last piece may be incomplete, so the period of the text's end counts: Knuth, Morris and Pratt 1977.
    borders = [0] * len(tail)
    longest = period = 0
    for end in range(1, len(tail)):
        border = borders[end - 1]
        while border and tail[end] != tail[border]:
            border = borders[border - 1]
        borders[end] = border + (tail[end] == tail[border])
        length = end + 1
        if length >= max(MIN_CHARACTERS, MIN_REPEATS * (length - borders[end])):
            longest, period = length, length - borders[end]
    if not longest:
        return None
    start = len(text) - longest
    while start and text[start - 1] == text[start - 1 + period]:
        start -= 1
    return start + period
