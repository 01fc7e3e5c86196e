"""The rows: what is asked, by how many clients at once, and how often."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """*num_clients* requests at once, each for *num_tokens* tokens after an image of *size* (width, height), or text.

    *same*: every request has the same image, which both sides have seen.
    """

    name: str
    size: tuple[int, int] | None
    num_clients: int
    num_tokens: int
    num_rounds: int
    same: bool = False


ROWS = (
    Row("text, 1 client", None, 1, 64, 8),
    Row("text, 4 clients", None, 4, 64, 6),
    Row("448x448, 1 client", (448, 448), 1, 24, 5),
    Row("448x448, 4 clients", (448, 448), 4, 24, 3),
    Row("448x448, the same image, 1 client", (448, 448), 1, 24, 5, same=True),
    Row("1280x960, 1 client", (1280, 960), 1, 8, 2),
)
