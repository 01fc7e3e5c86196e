"""The settings of a measurement, each with its flag, its default and its help."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from saccade.config import FLAT, Count, Many, NotNegative, Seconds, Size
from saccade.errors import StartupError

MIN_SIDE, MAX_SIDE = 2, 16384
LIMIT_NAMES = ("ttft", "tpot", "e2el")


class Load(NamedTuple):
    """A number of clients that wait for their answers ("concurrency"), or of requests a second ("request rate")."""

    kind: str
    value: float


def _list(parse: Callable[[str], object], example: str) -> Parameter:
    def read(_: Any, tokens: Sequence[Token]) -> tuple[object, ...]:
        try:
            return tuple(parse(part) for token in tokens for part in token.value.split(","))
        except (ValueError, TypeError) as error:
            raise ValueError(f"must be such as {example}") from error

    return Parameter(converter=read, n_tokens=1, accepts_keys=False, negative="", show_default=False)


def _above_0(number: float) -> float:
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _size(text: str) -> tuple[int, int]:
    width, height = (int(side) for side in text.split("x"))
    if not (MIN_SIDE <= width <= MAX_SIDE and MIN_SIDE <= height <= MAX_SIDE):
        raise ValueError
    return width, height


@FLAT
@dataclass(frozen=True)
class BenchSettings:
    """Which requests to send, when, and what to do with the answers."""

    concurrency: Annotated[tuple[float, ...], _list(lambda text: _above_0(int(text)), "1,10,30")] = ()
    "Clients that each wait for an answer before their next request; by default 8. 1,10,30 measures three loads."
    request_rate: Annotated[tuple[float, ...], _list(lambda text: _above_0(float(text)), "2,4.5")] = ()
    "Requests a second at random times (a Poisson process), instead of --concurrency."
    num_requests: Annotated[Count | None, Parameter(show_default=False)] = None
    "Requests of each run; by default 100, or with --seconds no limit."
    seconds: Annotated[Seconds | None, Parameter(show_default=False)] = None
    "Begin no request after this time; those on their way are finished and count."
    warmup: Annotated[Size | None, Parameter(show_default=False)] = None
    "Conversations before each run that do not count; by default one for each client, or 4 with --request-rate."
    alternations: Count = 3
    "How often each of two servers is measured, in the order A B, B A, A B."
    timeout: Seconds = 600.0
    "Seconds after which a request has failed."
    image_size: Annotated[tuple[tuple[int, int], ...], _list(_size, "640x480,1280x960, each side from 2 to 16384")] = (
        (640, 480),
    )
    "Size of generated images, such as 640x480 (the default) or 640x480,1280x960. Each image has one of them."
    images: Annotated[Path | None, Parameter(show_default=False)] = None
    "Send the images of this folder instead of generated ones."
    images_per_request: Size = 1
    "Images in a conversation's first message; 0 sends text only."
    repeat_share: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = 0.0
    "This share of the conversations has images that were sent before, with a new text."
    video_seconds: NotNegative = 0.0
    "Add a generated video of this length to the first message, in the first --image-size."
    turns: Count = 1
    "Requests of a conversation; each carries the messages and answers before it."
    input_tokens: Count = 50
    "Words of each message. They are short, so that most are one token."
    output_tokens: Count = 64
    "max_tokens; with ignore_eos, if the server takes it, so that every answer has this length."
    seed: Annotated[Size | None, Parameter(show_default=False)] = None
    "The same seed sends the same images and texts. By default a new one, whose images no cache holds."
    goodput: Annotated[Many, Parameter(consume_multiple=True)] = ()
    "Limits in ms such as ttft:500 tpot:50 (or e2el): also counts the requests a second that keep all of them."
    json: Annotated[Path | None, Parameter(show_default=False)] = None
    "Write settings, versions, figures and the times of every request to this file."
    html: Annotated[Path | None, Parameter(show_default=False)] = None
    "Write tables and plots to this file."

    def loads(self) -> list[Load]:
        """Return the loads to measure. Raises StartupError if there are two kinds."""
        if self.request_rate and self.concurrency:
            raise StartupError("--concurrency and --request-rate exclude each other: leave one out.")
        if self.request_rate:
            return [Load("request rate", rate) for rate in self.request_rate]
        return [Load("concurrency", count) for count in self.concurrency or (8,)]

    def limits(self) -> dict[str, float]:
        """Return the limits of --goodput in ms, by name. Raises StartupError."""
        pairs = [re.fullmatch(rf"({'|'.join(LIMIT_NAMES)}):(\d+(?:\.\d+)?)", limit) for limit in self.goodput]
        if not all(pairs):
            raise StartupError(f"--goodput takes limits such as ttft:500; the names are {', '.join(LIMIT_NAMES)}.")
        return {limit[1]: float(limit[2]) for limit in pairs if limit}
