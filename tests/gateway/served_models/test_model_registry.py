"""A gateway whose workers have no model that can be served stops, and says why. # A9"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fronts import DESCRIPTION, Front
from server import free_port
from stub_worker import StubWorker, stub

from saccade.errors import ModelNotFound, WorkerUnavailable
from saccade.fleet.pool import WorkerPool
from saccade.gateway.served_models import model_registry
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.models.files import read_model_files
from saccade.protocol.description import Description, ModelFiles
from saccade.transport.server import WorkerServer


@pytest.fixture
def sound(tiny_qwen3_vl: Path) -> Description:
    return msgspec.structs.replace(DESCRIPTION, files=read_model_files(tiny_qwen3_vl))


@pytest.fixture
def broken(sound: Description) -> Description:
    """A model whose config.json names a token for images that the tokenizer does not have."""
    config = json.loads(sound.files.files["config.json"])
    changed = {**sound.files.files, "config.json": json.dumps({**config, "image_token_id": 99999}).encode()}
    return msgspec.structs.replace(sound, model="broken", fingerprint=b"b" * 32, files=ModelFiles(files=changed))


@pytest.fixture(autouse=True)
def without_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are tried in this process alone: a child of its own takes a second."""
    monkeypatch.setattr(model_registry.ModelProbe, "run_child", lambda _: None)


def worker_of(description: Description | None, **facts: Any) -> StubWorker:
    return stub("grpc://described:1", description, **facts)


async def built(*workers: StubWorker) -> tuple[ModelRegistry, WorkerPool]:
    """A registry that has tried the models of *workers*."""
    worker_pool = WorkerPool((), lambda _: None)
    registry = ModelRegistry(worker_pool, {})
    for worker in workers:
        worker_pool.add(worker)
    for worker in workers:
        worker_pool.changed(worker)
        await asyncio.sleep(0)
    await tried()
    return registry, worker_pool


async def tried() -> None:
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name().startswith("model ")))


async def test_the_only_model_cannot_be_served(broken: Description) -> None:
    registry, _ = await built(worker_of(broken), worker_of(broken))
    assert "token 99999 stands for images" in registry.unservable.result().message


async def test_a_model_is_served_while_one_of_another_length_is_built(sound: Description) -> None:
    """A worker that joins may be the first by its place, and take longer prompts."""
    registry, worker_pool = await built(worker := worker_of(sound))
    worker.become(description=msgspec.structs.replace(sound, max_model_len=sound.max_model_len // 2))
    worker_pool.changed(worker)
    await asyncio.sleep(0)
    assert registry.get(sound.model).max_model_len == sound.max_model_len
    await tried()
    assert registry.get(sound.model).max_model_len == sound.max_model_len // 2


async def test_a_model_of_another_release_is_not_served_before_it_is_built(sound: Description) -> None:
    registry, worker_pool = await built(worker := worker_of(sound))
    config = json.loads(sound.files.files["config.json"])
    files = {**sound.files.files, "config.json": json.dumps({**config, "rope_theta": 7}).encode()}
    worker.become(description=msgspec.structs.replace(sound, fingerprint=b"c" * 32, files=ModelFiles(files=files)))
    worker_pool.changed(worker)
    await asyncio.sleep(0)
    with pytest.raises(WorkerUnavailable, match="is not ready yet"):
        registry.get(sound.model)
    await tried()
    assert registry.get(sound.model).name == sound.model


async def test_a_model_that_can_be_served_keeps_the_gateway(broken: Description, sound: Description) -> None:
    registry, worker_pool = await built(worker_of(broken), served := worker_of(sound))
    assert registry.unservable.cancelled()
    served.become(description=msgspec.structs.replace(broken, model=sound.model))
    worker_pool.changed(served)
    await asyncio.sleep(0)
    await tried()
    assert registry.models() == []


async def test_a_request_may_leave_out_the_only_model(sound: Description) -> None:
    one, _ = await built(worker_of(sound))
    assert one.get(None) is one.get(sound.model)
    two, _ = await built(worker_of(sound), worker_of(msgspec.structs.replace(sound, model="other")))
    with pytest.raises(ModelNotFound, match=f"name one of the models {sound.model}, other"):
        two.get(None)
    none, _ = await built()
    with pytest.raises(WorkerUnavailable):
        none.get(None)


async def test_a_worker_that_has_described_nothing_may_have_another_model(broken: Description) -> None:
    registry, worker_pool = await built(worker_of(broken), late := worker_of(None, ready=False))
    assert not registry.unservable.done()
    late.become(description=broken, ready=True)
    worker_pool.changed(late)
    await asyncio.sleep(0)
    assert registry.unservable.done()


class Describing(Front):
    """A front that describes one model."""

    def __init__(self, description: Description) -> None:
        super().__init__()
        self.description = description

    def describe(self, *, without_files: bool = False) -> bytes:
        return msgspec.msgpack.encode(self.description)


@pytest.mark.ci
async def test_the_program_ends_with_the_token_and_the_key(broken: Description, tmp_path: Path) -> None:
    server = WorkerServer(Describing(broken), f"unix:{tmp_path}/w.sock")
    await server.start()
    command = (sys.executable, "-m", "saccade.cli.main", "gateway", "--worker-url", server.address)
    try:
        process: Any = await asyncio.create_subprocess_exec(
            *command, "--port", str(free_port()), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        async with asyncio.timeout(60):
            _, said = await process.communicate()
    finally:
        await server.stop()
    assert process.returncode == 1
    assert "image_token_id" in said.decode()
    assert "token 99999" in said.decode()
