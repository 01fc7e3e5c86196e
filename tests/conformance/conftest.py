"""The two sides of every comparison, made once: of a release's files, and of whole tiny checkpoints."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from checkpoints import NETWORKS
from oracle_checks import RARE
from references.networks import ORACLES, Oracle
from subjects import SUBJECTS, Sides

from saccade.cli.bundled import bundled

BUNDLED = "bundled"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of rare checkpoints to `make conformance`."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if RARE & {params.get("name"), params.get("checkpoint_name")}:
            item.add_marker(pytest.mark.conformance)


@pytest.fixture(scope="session")
def sides(checkpoint: Callable[[str], Path]) -> Callable[[str], Sides]:
    """Both sides of a release, by the name of its checkpoint."""
    subjects = {subject.checkpoint: subject for subject in SUBJECTS}

    @cache
    def both(name: str) -> Sides:
        return Sides.of(subjects[name], checkpoint(name))

    return both


@pytest.fixture(scope="module", params=[*NETWORKS, BUNDLED])
def checkpoint_name(request: pytest.FixtureRequest) -> str:
    """Checkpoints with random weights, and the trained one that ships, a Qwen3-VL with tied embeddings."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(checkpoint_name: str, network_folder: Callable[[str], Path]) -> Path:
    """The checkpoint's folder."""
    return bundled("model") if checkpoint_name == BUNDLED else network_folder(checkpoint_name)


@pytest.fixture(scope="module")
def oracle(checkpoint_name: str, folder: Path) -> Oracle:
    """The reference with the checkpoint's weights."""
    return ORACLES["qwen3_vl" if checkpoint_name == BUNDLED else checkpoint_name](folder)
