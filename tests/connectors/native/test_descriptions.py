"""A worker's description as its gateway reads it."""

import gc
import weakref
from pathlib import Path

import msgspec
from fronts import DESCRIPTION, Front
from waiting import until

from saccade.connectors.context import ClientContext, KnownFiles
from saccade.connectors.native.client import WorkerClient
from saccade.connectors.native.descriptions import description_of
from saccade.identity.content import files_digest
from saccade.protocol.description import NO_FILES, Description, ModelFiles
from saccade.transport.server import WorkerServer


class Describing(Front):
    """A worker with *files* that notes how it was asked; one of the last release does not know the digest."""

    def __init__(self, files: ModelFiles, *, is_old: bool = False, has_files: bool = True) -> None:
        super().__init__()
        self.files = files
        self.is_old = is_old
        self.has_files = has_files
        self.asked: list[bool] = []

    def describe(self, *, without_files: bool = False) -> bytes:
        self.asked.append(without_files)
        described = msgspec.structs.replace(DESCRIPTION, files=self.files)
        if not self.is_old and (without_files or not self.has_files):
            digest = files_digest(self.files.files)
            described = msgspec.structs.replace(described, files=NO_FILES, files_digest=digest)
        return msgspec.msgpack.encode(described)


async def describe_all(tmp_path: Path, *workers: Describing) -> list[Description | None]:
    """What a gateway that connects to all *workers* at once reads of each."""
    known = KnownFiles()
    servers = [WorkerServer(worker, f"unix:{tmp_path}/{number}.sock") for number, worker in enumerate(workers)]
    clients = [WorkerClient(server.address, ClientContext(known_files=known)) for server in servers]
    try:
        for server in servers:
            await server.start()
        for client in clients:
            await client.start()
        await until(lambda: all(client.description or client.loss for client in clients))
        return [client.description for client in clients]
    finally:
        for client in clients:
            await client.close()
        for server in servers:
            await server.stop()


async def test_files_of_a_model_are_sent_once(tmp_path: Path) -> None:
    files, others = ModelFiles(files={"config.json": b"{}"}), ModelFiles(files={"config.json": b"{ }"})
    workers = [Describing(files), Describing(files), Describing(files), Describing(others)]
    described = await describe_all(tmp_path, *workers)
    assert [one.files if one else None for one in described] == [files, files, files, others]
    assert [one.files_digest if one else None for one in described] == [b""] * 4
    assert sum(worker.asked.count(False) for worker in workers[:3]) == 1
    assert workers[3].asked == [True, False]


async def test_workers_of_the_last_release_send_their_files(tmp_path: Path) -> None:
    files = ModelFiles(files={"config.json": b"{}"})
    described = await describe_all(tmp_path, Describing(files, is_old=True), Describing(files))
    assert [one.files if one else None for one in described] == [files, files]


async def test_worker_that_keeps_its_files_to_itself_is_not_used(tmp_path: Path) -> None:
    (described,) = await describe_all(tmp_path, Describing(ModelFiles(files={"a": b"1"}), has_files=False))
    assert described is None


def payload(model: str, **files: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(DESCRIPTION, model=model, files=ModelFiles(files=files)))


def test_equal_files_of_several_workers_are_kept_once() -> None:
    known = KnownFiles()
    one, same = (description_of(payload(name, config=b"{}"), known) for name in ("a", "b"))
    other = description_of(payload("a", config=b"{ }"), known)
    assert (one.model, same.model) == ("a", "b")
    assert one.files is same.files
    assert other.files.files == {"config": b"{ }"}


def test_files_of_a_worker_that_is_gone_are_not_kept() -> None:
    known = KnownFiles()
    gone = weakref.ref(description_of(payload("a", config=b"1"), known).files)
    gc.collect()
    assert gone() is None
