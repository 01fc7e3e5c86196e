"""The two sides of every comparison, made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from subjects import SUBJECTS, Sides


@pytest.fixture(scope="session")
def sides(checkpoint: Callable[[str], Path]) -> Callable[[str], Sides]:
    """Both sides of a release, by the name of its checkpoint."""
    subjects = {subject.checkpoint: subject for subject in SUBJECTS}

    @cache
    def both(name: str) -> Sides:
        return Sides.of(subjects[name], checkpoint(name))

    return both
