"""`saccade fleet` over two nodes of Ray on this machine: one is killed, and service goes on."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from server import Server, free_port, program
from tables import table
from waiting import wait_until

from saccade.cli.main import run
from saccade.supervisor import ray_fleet

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("ignore::Warning")]  # Ray's own


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "worker.token"
    path.write_text("a token that all of them have".replace(" ", "-"))
    path.chmod(0o600)
    return path


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes with a CPU each, so that two workers cannot be on one."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    running = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        running.add_node(**node)
        yield running
    finally:
        running.shutdown()


def ask(server: Server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "words " * 40}], "max_tokens": 2}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] >= 1


def num_ready(server: Server) -> int:
    try:
        return int(server.metric("saccade_worker_ready"))
    except LookupError:
        return 0


def test_service_goes_on_when_a_node_is_killed(cluster: Any, token: Path, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    file, port = tmp_path / "workers", free_port()
    engine = ("--served-model-name", "tiny", "--max-model-len", "512", "--dtype", "float32", "--threads", "1")
    place = ("--ray", cluster.address, "--replicas", "2", "--workers-file", str(file))
    common = ("--worker-token-file", str(token))
    gateway = ("gateway", "--workers-file", str(file), "--port", str(port), "--decode-processes", "1", *common)
    with (
        program(*gateway) as served,
        program("fleet", str(tiny_qwen3_vl), *place, *common, "--shutdown-timeout", "5", *engine) as fleet,
    ):
        server = Server(port, served)
        wait_until(lambda: server.is_ready() and num_ready(server) == 2)
        ask(server)
        before = set(file.read_text().split())
        assert len(before) == 2
        (tmp_path / "new").touch()
        assert file.stat().st_mode == (tmp_path / "new").stat().st_mode  # a gateway may run as another user

        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        wait_until(lambda: num_ready(server) == 1)
        for _ in range(6):
            ask(server)
        wait_until(lambda: len(file.read_text().split()) == 1)
        assert set(file.read_text().split()) < before

        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        wait_until(lambda: num_ready(server) == 2)
        assert len(set(file.read_text().split()) - before) == 1
        ask(server)

        # A worker that dies on a healthy node is started again there, at another port.
        here = set(file.read_text().split())
        os.kill(workers_of(token)[0], signal.SIGKILL)
        wait_until(lambda: num_ready(server) == 2 and set(file.read_text().split()) != here)

        fleet.send_signal(signal.SIGTERM)
        fleet.wait(60)
        wait_until(lambda: file.read_text() == "# no worker\n" and num_ready(server) == 0)
        wait_until(lambda: not workers_of(token))


def workers_of(token: Path) -> list[int]:
    """The process ids of the workers with this *token*."""
    import psutil

    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "worker" in (words := process.info["cmdline"] or []) and str(token) in words and "fleet" not in words
    ]


ONE, TWO = "grpc://10.0.0.1:9000", "grpc://[fd00::1]:9000"
NEVER = object()


@table(
    ("answers", "urls"),
    [
        ([ONE, TWO, ONE], [(ONE,), (TWO,), (ONE,)]),
        ([ONE, RayActorError(), ONE], [(ONE,), (), (ONE,)]),
        ([ONE, NEVER], [(ONE,), (ONE,), (), ()]),
        ([ONE, f"{ONE}\nunix:/run/docker.sock"], [(ONE,), ()]),
        ([f"{ONE} # {TWO}", f"{ONE}\u2028{TWO}", f"{ONE}\x1b[2J"], [(), (), ()]),
        (["unix:/run/docker.sock", "vllm://10.0.0.1:80", "", "grpc://no port", "grpc://a:1/b"], [()] * 5),
        ([7, None, ONE.encode(), [ONE]], [()] * 4),
    ],
)
def test_answers_of_replicas_are_addresses_or_nothing(
    answers: list[object], urls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says what each look at a replica finds, a look every 3 s: new ones each time, none, late, malformed."""
    seconds = iter(range(0, 3600, 3))
    left = iter(answers)

    def get(answer: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    actor = SimpleNamespace(url=SimpleNamespace(remote=lambda: next(left)))
    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    ray = SimpleNamespace(
        remote=lambda _: actor_class,
        get=get,
        wait=lambda asked, timeout: ([], asked) if asked == [NEVER] else (asked, []),
    )
    monkeypatch.setattr(ray_fleet, "ray", ray)
    monkeypatch.setattr(ray_fleet, "join", lambda _: None)
    monkeypatch.setattr(ray_fleet, "placement_group", lambda *_, **__: None)
    monkeypatch.setattr(ray_fleet, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(ray_fleet, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    fleet = ray_fleet.RayFleet("auto", ray_fleet.ReplicaSpec((), {}, 1.0), 1)
    assert [fleet.urls() for _ in urls] == urls


@pytest.mark.parametrize("missing", ["the cluster", "the token"])
def test_missing_cluster_or_token_is_named(
    missing: str, token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing == "the token":
        token.unlink()
    place = ["--ray", f"127.0.0.1:{free_port()}", "--workers-file", str(tmp_path / "workers")]
    assert run(["fleet", str(tmp_path), *place, "--worker-token-file", str(token)]) == 1
    said = capsys.readouterr().err
    assert ("There is no Ray cluster at" if missing == "the cluster" else "worker.token") in said
    assert "Traceback" not in said
