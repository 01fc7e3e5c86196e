"""What tests of several families' networks share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import networks
import pytest


@pytest.fixture(scope="module")
def network(network_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """The loaded network of a tiny checkpoint, by its name."""
    return cache(lambda name: networks.load(network_folder(name)))
