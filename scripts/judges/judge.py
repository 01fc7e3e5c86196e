"""What a judge is: a part of a release's tests, and how Saccade is put before it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from judges.outcomes import Outcome

Run = Callable[[Path, frozenset[str]], Iterable[Outcome]]
"""Takes the folder of what is fetched and the names of the tests that do not apply; returns what became of all."""


@dataclass(frozen=True)
class Judge:
    """A judge: its name, the release that its tests are of, and what docs/judges.md says of it."""

    name: str
    release: str
    says: str
    """Which tests run, how Saccade is put before them, and what is left out: a paragraph of the page."""
    run: Run

    @property
    def known(self) -> Path:
        """The list of what is known of its tests."""
        return Path(__file__).parent / "known" / f"{self.name}.toml"
