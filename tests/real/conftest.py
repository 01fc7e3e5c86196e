"""Releases of libraries for GPUs: the oldest that Saccade takes, and the newest."""

import pytest
from libraries import Library, requirement, unpacked

FLASHINFER = "flashinfer-python"


@pytest.fixture(scope="session", params=[requirement(FLASHINFER), "newest"])
def flashinfer(request: pytest.FixtureRequest) -> Library:
    return Library(unpacked(FLASHINFER, request.param))
