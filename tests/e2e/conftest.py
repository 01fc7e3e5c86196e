"""One server on the tiny checkpoint for all end-to-end tests, and the reference beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from reference import Reference
from server import Server, serving


@pytest.fixture(scope="session")
def tiny_server(tiny_qwen3_vl: Path) -> Iterator[Server]:
    """`saccade serve` on the tiny random checkpoint."""
    with serving(str(tiny_qwen3_vl), "--max-model-len", "4096") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_reference(tiny_qwen3_vl: Path) -> Reference:
    """transformers on the same checkpoint."""
    return Reference(tiny_qwen3_vl)
