"""How a program tells what its client did.

A program prints one line of JSON for each thing that it tried: client, version, what, ok, detail. This module needs
nothing but Python, since each program runs in an environment that has its client only.
"""

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version

DETAIL_CHARACTERS = 300


@dataclass(frozen=True)
class Result:
    """A thing that was tried with a client; *detail* says why it failed."""

    client: str
    version: str
    what: str
    ok: bool
    detail: str = ""


def expect(found: object, *wanted: object) -> None:
    """Raise unless *found* is one of *wanted*."""
    if found not in wanted:
        raise ValueError(f"expected {' or '.join(map(repr, wanted))}, got {found!r}")


def tell(client: str, distribution: str, attempts: Mapping[str, Callable[[], None]]) -> None:
    """Make each of *attempts* and print its result; *distribution* is the package whose version is told."""
    for what, attempt in attempts.items():
        detail = ""
        try:
            attempt()
        except Exception as error:  # whatever a client raises is its result
            traceback.print_exc()
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:DETAIL_CHARACTERS]
        result = Result(client, version(distribution), what, not detail, detail)
        print(json.dumps(asdict(result)), flush=True)
