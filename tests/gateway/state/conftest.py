"""Databases for tests: SQLite everywhere, PostgreSQL if the machine has its programs. And gateways over one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import postgres
import pytest
from batch_calls import Open, gateways

from saccade.gateway.apis.batches import runner
from saccade.gateway.state.connection import Server
from saccade.gateway.state.postgres import PostgresServer
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.sqlite import SqliteFolder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Postgres]:
    if not postgres.IS_INSTALLED:
        pytest.skip("needs PostgreSQL's programs, as in Debian's package postgresql")
    with postgres.running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def new_location(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Returns a new value for --state at each call."""
    if request.param == "sqlite":
        numbers = iter(range(1000))
        return lambda: str(tmp_path / str(next(numbers)))
    server: postgres.Postgres = request.getfixturevalue("postgres_server")
    return server.new_schema


@pytest.fixture
def server(new_location: Callable[[], str]) -> Server:
    location = new_location()
    return PostgresServer(location) if location.startswith("postgresql:") else SqliteFolder(Path(location))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have batches looked for, and go on, several times a second."""
    for name in ("POLL_SECONDS", "PROGRESS_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(runner, name, 0.05)


@pytest.fixture
def opening(new_location: Callable[[], str], tiny_qwen3_vl: Path, tmp_path: Path) -> Open:
    """Runs gateways over one new database."""
    return gateways(tiny_qwen3_vl, StateSettings(new_location(), tmp_path / "key"))
