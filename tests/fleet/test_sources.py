"""Files and names tell which workers there are, and go on doing so when they cannot be read."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from name_server import AAAA, A, naming
from prometheus_client import CollectorRegistry
from waiting import until

from saccade.errors import StartupError
from saccade.fleet.metrics import SourceCollector
from saccade.fleet.pool import WorkerPool
from saccade.fleet.sources import MAX_FILE_BYTES, Discovery, Source, WorkersDns, WorkersFile
from saccade.fleet.traffic import WorkerTraffic

ONE, TWO, THREE = (f"grpc://10.0.0.{number}:9000" for number in (1, 2, 3))


class Seen:
    """What a source has said last, and how often it has said anything."""

    def __init__(self) -> None:
        self.urls: tuple[str, ...] | None = None
        self.count = 0


@contextlib.asynccontextmanager
async def following(source: Source) -> AsyncIterator[Seen]:
    seen = Seen()

    async def follow() -> None:
        async for urls in source.urls():
            seen.urls, seen.count = tuple(urls), seen.count + 1

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def write(path: Path, text: str) -> None:
    """Replace *path* in one step."""
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


async def test_a_file_is_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers"
    async with following(WorkersFile(path, 0.01)) as seen:
        await until(lambda: "No such file" in caplog.text)
        write(path, f"# our workers\n{ONE}\n\n  {TWO}  # the new one\nnonsense\ngrpc://no port:1\n{THREE}")
        await until(lambda: seen.urls == (ONE, TWO, THREE))
        assert "line 5 is left out" in caplog.text
        assert "line 6 is left out" in caplog.text
        path.write_text(f"{TWO}\n")
        await until(lambda: seen.urls == (TWO,))
        write(path, "# none\n\n")
        await until(lambda: seen.urls == ())


async def test_a_line_has_its_workers_options(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers"
    lines = (f"{ONE} cordoned  weight=0.5 # slow", f"{TWO} share=10%", f"{THREE} weight=fast", f"{THREE} wait=2")
    write(path, "\n".join((*lines, "sglang://10.0.0.4:1?role=decode weight=2")))
    async for urls in WorkersFile(path, 0.01).urls():
        assert urls == {ONE: WorkerTraffic(cordoned=True, weight=0.5), TWO: WorkerTraffic(share=0.1)}
        break
    for reason in (
        "line 3 is left out: 'weight=fast' is no option of a worker",
        "line 4 is left out: 'wait=2' is no option of a worker",
        "line 5 is left out: One side of pairs has no options",
    ):
        assert reason in caplog.text


async def test_a_file_without_a_worker_keeps_its_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers"
    write(path, ONE)
    async with following(WorkersFile(path, 0.01)) as seen:
        await until(lambda: seen.urls == (ONE,))
        for content in (b"", b"\n \n", b"\xff\xfe\x00", b"nonsense\n", b"# half a line\ngrpc://10"):
            caplog.clear()
            path.with_suffix(".new").write_bytes(content)
            os.replace(path.with_suffix(".new"), path)
            await until(lambda: "its last workers stay" in caplog.text)
            assert (seen.urls, seen.count) == ((ONE,), 1), content
            write(path, f"{ONE}\n{TWO}")
            await until(lambda: seen.urls == (ONE, TWO))
            write(path, ONE)
            await until(lambda: seen.urls == (ONE,))
            seen.count = 1


async def test_file_that_is_followed_again_gives_its_workers_again(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    write(path, ONE)
    source = WorkersFile(path, 0.01)
    for _ in range(2):
        async with following(source) as seen:
            await until(lambda seen=seen: seen.urls == (ONE,))  # type: ignore[misc]


async def test_a_metric_tells_whether_a_source_is_used(tmp_path: Path) -> None:
    path, registry = tmp_path / "workers", CollectorRegistry()
    worker_pool = WorkerPool((), lambda _: None)
    discovery = Discovery(worker_pool, lambda _: 0, 0.0)
    registry.register(SourceCollector(discovery))
    assert list(registry.collect()) == []

    def is_current(source: str) -> float | None:
        return registry.get_sample_value("saccade_worker_source_current", {"source": source})

    write(path, "# none")
    async with naming({A: [b"\x0a\0\0\1"]}) as (_, resolver):
        discovery.follow(WorkersFile(path, 0.01))
        discovery.follow(WorkersDns("grpc://workers.test:9000", resolver))
        discovery.follow(WorkersDns("grpc://unknown.test:9000", resolver))
        try:
            await until(lambda: is_current("--worker-dns grpc://unknown.test:9000") == 0)
            await until(lambda: discovery.sources_of(ONE) == ("--worker-dns grpc://workers.test:9000",))
            assert is_current("--worker-dns grpc://workers.test:9000") == 1
            for content in ("", "nonsense"):
                write(path, content)
                await until(lambda: is_current("--workers-file") == 0)
                write(path, "# none")
                await until(lambda: is_current("--workers-file") == 1)
            path.unlink()
            await until(lambda: is_current("--workers-file") == 0)
        finally:
            await discovery.close()
            await worker_pool.close()


async def test_a_file_that_cannot_be_read_keeps_its_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers"
    write(path, ONE)
    async with following(WorkersFile(path, 0.01)) as seen:
        await until(lambda: seen.urls == (ONE,))
        path.unlink()
        await until(lambda: "No such file" in caplog.text)
        path.mkdir()
        await until(lambda: "Is a directory" in caplog.text)
        path.rmdir()
        write(path, "#" * (MAX_FILE_BYTES + 1))
        await until(lambda: "bytes" in caplog.text)
        assert (seen.urls, seen.count) == ((ONE,), 1)
        write(path, TWO)
        await until(lambda: seen.urls == (TWO,))
    # Each look at a fault that stays is no line of its own; between two states the file may be missing for a moment.
    lines = [record.getMessage() for record in caplog.records if "its last workers stay" in record.getMessage()]
    assert all(before != after for before, after in itertools.pairwise(lines))


async def test_every_address_of_a_name_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.fleet.sources.MIN_DNS_SECONDS", 0.01)
    monkeypatch.setattr("saccade.fleet.sources.MAX_DNS_SECONDS", 0.01)
    addresses = {A: [bytes([10, 0, 0, number]) for number in range(2, 42)], AAAA: [b"\xfd" + bytes(14) + b"\1"]}
    async with (
        naming(addresses) as (server, resolver),
        following(WorkersDns("grpc://workers.test:9000", resolver)) as seen,
    ):
        await until(lambda: seen.urls is not None)
        # The same workers answer at their IPv6 addresses.
        assert set(seen.urls or ()) == {f"grpc://10.0.0.{number}:9000" for number in range(2, 42)}
        addresses[A] = addresses[A][::-1]
        asked = len(server.asked)
        await until(lambda: len(server.asked) > asked + 8)
        assert seen.count == 1  # the order of the answers is no change
        addresses[A] = [b"\x0a\0\0\1"]
        await until(lambda: seen.urls == (ONE,))
        addresses[A], addresses[AAAA] = [], []
        asked = len(server.asked)
        await until(lambda: len(server.asked) > asked + 8)
        assert seen.urls == (ONE,)
        addresses[AAAA] = [b"\xfd" + bytes(14) + b"\1"]
        await until(lambda: seen.urls == ("grpc://[fd00::1]:9000",))


async def test_each_answer_counts_whole_and_a_cut_one_not_at_all() -> None:
    """A message of DNS has room for 4,092 addresses; the rest would come over TCP."""
    addresses = {A: [bytes([10, 1, number >> 8, number & 255]) for number in range(4000)]}
    async with naming(addresses) as (server, resolver):
        source = WorkersDns("grpc://workers.test:9000", resolver)
        urls, _ = await source.look_up()
        assert len(set(urls)) == 4000
        for number in range(8):
            addresses[A] = [bytes([10, 2, 0, number])] * 9
            assert await source.look_up() == ((f"grpc://10.2.0.{number}:9000",), 60.0)
        server.truncates = True
        assert await source.look_up() == ((), 5.0)
        assert source.fault == "the name cannot be looked up"
        server.truncates = False
        assert (await source.look_up())[0] == ("grpc://10.2.0.7:9000",)
        assert source.fault == ""


async def test_a_name_is_asked_for_again_within_bounds() -> None:
    async with naming(seconds_to_live=0) as (server, resolver):
        assert await WorkersDns("vllm://a.test:1?ranks=2", resolver).look_up() == (("vllm://127.0.0.1:1?ranks=2",), 5.0)
        server.seconds_to_live = 30
        assert (await WorkersDns("grpc://a.test:1", resolver).look_up())[1] == 30.0
        server.seconds_to_live = 3600
        assert (await WorkersDns("grpc://a.test:1", resolver).look_up())[1] == 60.0
        assert await WorkersDns("grpc://unknown.test:1", resolver).look_up() == ((), 5.0)


@pytest.mark.parametrize(
    "url", ["workers:9000", "grpcs://workers:9000", "vllms://workers:1", "grpc://workers", "unix:/a"]
)
def test_a_name_that_leads_to_no_worker_is_refused(url: str) -> None:
    with pytest.raises(StartupError):
        WorkersDns(url)
