"""What `saccade doctor` finds on a machine, in a model's folder, and in a fleet."""

import asyncio
import json
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import echo_worker
import msgspec
import pytest
import scripted
from fronts import DESCRIPTION
from stub_worker import StubWorker, draining, stub
from tables import table
from torch_builds import build

from saccade.cli.fleet_checks import check_fleet, check_transfers, reports_of_gateway, reports_of_workers
from saccade.cli.machine_checks import (
    Finding,
    check_confinement,
    check_gpus,
    check_machine,
    check_model,
    check_open_files,
    check_port,
    check_torch,
)
from saccade.cli.main import run
from saccade.errors import StartupError
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.pool import WorkerPool
from saccade.fleet.report import CORDONED, WorkerReport, worker_report
from saccade.fleet.router import Router
from saccade.gateway import app
from saccade.gateway.confinement import MEASURES
from saccade.gateway.server.access_log import AccessLog
from saccade.transport.credentials import NO_CREDENTIALS


def test_this_machine_has_a_finding_of_each_kind() -> None:
    findings = {finding.name: finding for finding in check_machine(0)}
    assert {"torch", "shared memory", "open files", "port", "decode processes"} <= findings.keys()
    assert findings["port"].state == "ok"
    assert all(finding.state == "ok" or finding.fix or "." in finding.detail for finding in findings.values())


def test_a_machine_with_a_gpu_hears_of_its_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for with_gpu in (True, False):
        monkeypatch.setattr("saccade.cli.machine_checks.has_gpu", lambda with_gpu=with_gpu: with_gpu)
        details = [finding.detail for finding in check_machine(0) if finding.name == "first start"]
        assert ["15,000 for experts" in detail for detail in details] == [True] * with_gpu


def test_a_cpu_build_of_torch_wastes_a_gpu(tmp_path: Path) -> None:
    torch = build(tmp_path, "libtorch_cpu.so")
    assert check_torch(torch, with_gpu=True).state == "warning"
    assert check_torch(torch, with_gpu=False) == Finding("torch", "ok", "2.13.0, for the CPU")
    assert check_torch(None, with_gpu=False).state == "ok"  # of a machine that runs gateways


H100 = "0, NVIDIA H100 80GB HBM3, 580.65.06, 4, 81559\n"
CUDA_13 = "filelock nvidia-cudnn-cu13==9.1; platform_system == 'Linux'"


@table(
    ("listing", "requirements", "state", "words"),
    [
        (H100, CUDA_13, "ok", "NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.65.06"),
        (H100.replace("580", "570"), CUDA_13, "failed", "too old"),
        (H100.replace("580", "570"), "nvidia-cublas-cu12==12.8", "ok", "570"),
        (H100.replace(" 4,", " 70000,"), CUDA_13, "warning", "70000 MiB"),
        ("", CUDA_13, "failed", "lists none"),
        ("NVIDIA-SMI has failed\n", "", "failed", "lists none"),
    ],
)
def test_gpu(listing: str, requirements: str, state: str, words: str) -> None:
    (finding,) = check_gpus(listing, requirements)
    assert (finding.state, words in finding.detail) == (state, True)
    assert bool(finding.fix) is (state != "ok")


def test_limits_and_measures() -> None:
    assert check_open_files(resource.RLIM_INFINITY).state == check_open_files(65536).state == "ok"
    assert "1024 are allowed" in check_open_files(1024).detail
    assert check_confinement(list(MEASURES)).state == "ok"
    assert check_confinement([*MEASURES[:2], "seccomp"]).detail == "they are not confined by landlock"


def test_port_of_another_program_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        finding = check_port(other.getsockname()[1])
    assert finding.state == "failed"
    assert "Choose another --host or --port." in finding.detail


@pytest.mark.ci
def test_model(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    finding = check_model(tiny_qwen3_vl)
    assert (finding.state, finding.detail.startswith("qwen3_vl, ")) == ("ok", True)
    folder = shutil.copytree(tiny_qwen3_vl, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"cut off")
    assert "model.safetensors" in check_model(folder).detail
    assert check_model(tmp_path).state == "failed"


def reports(*workers: StubWorker) -> list[WorkerReport]:
    fleet = WorkerPool((), lambda _: None)
    view = CacheListener(fleet, Router("auto", BlockIndex(1 << 20), Random(0)))
    for worker in workers:
        fleet.add(worker)
    return [worker_report(worker, fleet, view) for worker in fleet.clients]


async def found(*workers: StubWorker) -> dict[tuple[str, str], str]:
    return {(one.name, one.state): one.detail async for one in check_fleet(reports(*workers))}


async def test_fleet() -> None:
    other = msgspec.structs.replace(DESCRIPTION, fingerprint=b"other".ljust(32))
    newer = msgspec.structs.replace(DESCRIPTION, version="1")
    findings = await found(
        stub("unix:/a", DESCRIPTION),
        stub("unix:/newer", newer),
        stub("unix:/away", DESCRIPTION, ready=False),
        draining("unix:/leaving", DESCRIPTION),
        stub("unix:/other", other),
    )
    assert findings["unix:/leaving", "warning"] == "it drains"
    assert findings["unix:/away", "failed"] == "it is not ready"
    assert "another release" in findings["unix:/other", "failed"]
    assert findings["unix:/a", "ok"] == "it serves m, version 0, role both"
    assert findings["unix:/a", "warning"].startswith("what it holds is known to the level NONE: ")
    assert findings["m", "warning"] == "its workers have versions 0, 1"
    assert await found() == {("workers", "failed"): "there are none"}


async def test_a_cordoned_worker_is_a_warning() -> None:
    (report,) = reports(stub("unix:/a", DESCRIPTION))
    first = await anext(check_fleet([msgspec.structs.replace(report, excluded=CORDONED)]))
    assert (first.name, first.state, first.detail) == ("unix:/a", "warning", "it is cordoned")


async def test_half_of_a_split_cannot_answer() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(16))
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        prefill = msgspec.structs.replace(DESCRIPTION, role="prefill", kv_transfer_address=address)
        findings = await found(stub("unix:/p", prefill))
        assert findings["m", "failed"] == "there is no decode worker"
        assert findings["unix:/p", "ok"] == f"its KV transfers at {address} can be reached"
    assert (await check_transfers("unix:/p", address)).state == "failed"


@pytest.mark.ci
async def test_workers_are_asked_as_a_gateway_would(tmp_path: Path) -> None:
    async with echo_worker.serving(tmp_path / "a") as one, echo_worker.serving(tmp_path / "b") as other:
        known = await reports_of_workers([one.server.bind, other.server.bind], NO_CREDENTIALS)
    assert [(report.exactness, report.ready) for report in known] == [("EXACT", True)] * 2


@contextmanager
def admin_port(gateway: scripted.Gateway) -> Iterator[str]:
    """The URL of an admin port of *gateway*, whose key is `operator`."""
    done = asyncio.Event()

    async def serve(listener: socket.socket) -> None:
        async with app.administered(gateway.application, ("operator",), listener, AccessLog()):
            await done.wait()

    with closing(app.listen("127.0.0.1", 0)) as listener:
        serving = asyncio.run_coroutine_threadsafe(serve(listener), gateway.loop)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        gateway.loop.call_soon_threadsafe(done.set)
        serving.result(20)


@pytest.mark.ci
def test_gateway_is_asked_for_its_workers(tiny_qwen3_vl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted.running(tiny_qwen3_vl) as gateway, admin_port(gateway) as url:
        assert check_port(gateway.port).state == "ok"
        (report,) = reports_of_gateway(url, "operator")
        assert (report.url, report.version) == (gateway.worker.url, "0")
        command = ["doctor", "--gateway", url, "--admin-key", "operator"]
        assert run(command) == 0
        assert "ok       tiny: 1 workers serve the same release\n" in capsys.readouterr().out
        gateway.worker.become(ready=False)
        assert run([*command, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["findings"][0]["state"] == "failed"
        with pytest.raises(StartupError, match="admin-key"):
            reports_of_gateway(url, "wrong")
    assert run(["doctor", "--gateway", url]) == 1
