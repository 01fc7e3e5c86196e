"""What the admin port sets of the workers' traffic outlives the gateway, and reaches all processes."""

import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fronts import DESCRIPTION
from stub_worker import stub
from tables import table
from waiting import until

from saccade.errors import StartupError
from saccade.fleet.pool import WorkerPool
from saccade.fleet.traffic import FleetTraffic, TrafficChange, WorkerTraffic
from saccade.fleet.traffic_control import TrafficControl
from saccade.fleet.traffic_file import MAX_FILE_BYTES, TrafficFile


@contextlib.asynccontextmanager
async def process(path: Path | None) -> AsyncIterator[tuple[WorkerPool, TrafficControl]]:
    """The pool and the control of a gateway process with two workers."""
    worker_pool = WorkerPool((), lambda _: None)
    for name in "ab":
        worker_pool.add(stub(name, DESCRIPTION))
    control = TrafficControl(worker_pool, path, every_seconds=0.01)
    await control.start()
    try:
        yield worker_pool, control
    finally:
        await control.close()


def ready(worker_pool: WorkerPool) -> list[str]:
    """The workers that may get requests."""
    return [worker.url for worker in worker_pool.model("m").workers]


async def test_a_cordon_survives_a_restart_of_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    async with process(path) as (worker_pool, control):
        await control.change("a", {"cordoned": True})
        await control.change("b", {"weight": 2.0})
        assert ready(worker_pool) == ["b"]
    async with process(path) as (worker_pool, control):
        assert ready(worker_pool) == ["b"]
        assert worker_pool.traffic.of("b") == WorkerTraffic(weight=2.0)
        await control.change("a", {"cordoned": None})
    async with process(path) as (worker_pool, _):
        assert ready(worker_pool) == ["a", "b"]
        assert worker_pool.traffic.changes == {"b": TrafficChange(weight=2.0)}


async def test_without_a_file_a_change_ends_with_the_gateway() -> None:
    async with process(None) as (worker_pool, control):
        await control.change("a", {"cordoned": True, "share": 0.5})
        await control.change("a", {"share": None})
        assert worker_pool.traffic.changes == {"a": TrafficChange(cordoned=True)}
        assert ready(worker_pool) == ["b"]
    async with process(None) as (worker_pool, _):
        assert ready(worker_pool) == ["a", "b"]


async def test_a_change_at_one_process_reaches_the_others(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    async with process(path) as (first, control), process(path) as (second, other):
        await control.change("a", {"cordoned": True})
        await until(lambda: ready(second) == ["b"])
        await other.change("b", {"share": 0.1})
        await until(lambda: first.traffic == second.traffic)
        assert first.traffic.of("a") == WorkerTraffic(cordoned=True)
        assert first.traffic.of("b") == WorkerTraffic(share=0.1)


async def test_a_change_keeps_what_a_source_lists(tmp_path: Path) -> None:
    async with process(tmp_path / "traffic.json") as (worker_pool, control):
        worker_pool.direct(FleetTraffic({"a": WorkerTraffic(weight=0.5, cordoned=True)}))
        await control.change("a", {"cordoned": False})
        assert worker_pool.traffic.of("a") == WorkerTraffic(weight=0.5)
        await control.change("a", {"cordoned": None})
        assert worker_pool.traffic.of("a") == WorkerTraffic(weight=0.5, cordoned=True)


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    TrafficFile(path).create()
    files = [TrafficFile(path) for _ in range(4)]
    threads = [
        threading.Thread(
            target=lambda file=file, first=first: [file.change(f"{first + n}", {"weight": 2.0}) for n in range(8)]
        )
        for first, file in zip(range(0, 32, 8), files, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(TrafficFile(path).create()) == {str(number) for number in range(32)}
    assert [one.name for one in tmp_path.iterdir()] == ["traffic.json"]


@table(
    "content",
    [
        *(b"", b"[]", b"{", b"\xff", b'{"a": 1}', b'{"a": {"weight": 0}}', b'{"a": {"weight": "2"}}', b"[" * 5000),
        *(b'{"a": {"share": 2}}', b'{"a": {"share": -0.1}}', b'{"a": {"drained": true}}', b'{"a": {"cordoned": 1}}'),
    ],
)
def test_a_malformed_file_is_refused_at_the_start(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "traffic.json"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"--traffic-file .* cannot be used: it must be a JSON object of workers"):
        TrafficFile(path).create()
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_read_or_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be written: No such file or directory"):
        TrafficFile(tmp_path / "none" / "traffic.json").create()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StartupError, match="cannot be used: Is a directory"):
        TrafficFile(tmp_path / "folder").create()
    (tmp_path / "long").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(StartupError, match="cannot be used: it has more than 1048576 bytes"):
        TrafficFile(tmp_path / "long").create()


async def test_a_fault_of_the_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "traffic.json"
    async with process(path) as (worker_pool, control):
        await control.change("a", {"cordoned": True})
        with pytest.raises(StartupError, match="would have over 1048576 bytes"):
            await control.change("b" * MAX_FILE_BYTES, {"cordoned": True})
        path.write_bytes(b"{")
        await until(lambda: "Its last changes stay." in caplog.text)
        with pytest.raises(StartupError, match="cannot be used"):
            await control.change("a", {"cordoned": None})
        assert ready(worker_pool) == ["b"]
        path.unlink()
        await until(lambda: "No such file or directory" in caplog.text)
        path.write_bytes(b'{"b": {"cordoned": true}}')
        await until(lambda: ready(worker_pool) == ["a"])
