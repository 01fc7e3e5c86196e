"""What tests of several connectors share."""

from collections.abc import Iterator

import pytest
from tokenspeed_worker import Slots


@pytest.fixture
def slots() -> Iterator[Slots]:
    """A gateway's slots; no link to one may be left after a test."""
    slots = Slots()
    yield slots
    assert slots.links() == []
    slots.pool.close()
