"""One gateway with a scripted worker for all tests that do not break it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted


@pytest.fixture(scope="session")
def shared_gateway(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: scripted.Gateway) -> scripted.Gateway:
    """The gateway, its worker set to answer two tokens and stop."""
    worker = shared_gateway.worker
    shared_gateway.answer_two_tokens()
    worker.requests.clear()
    worker.aborted.clear()
    worker.num_aborted = 0
    return shared_gateway
