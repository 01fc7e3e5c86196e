"""A fleet on a Ray cluster of two nodes, in a network namespace: it is applied, hurt, changed and deleted."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml

pytest.importorskip("ray.serve", reason="needs Ray: pip install 'ray[serve]'")

ROOT = Path(__file__).parents[2]
NODES = ROOT / "tests" / "support" / "workers" / "ray_nodes.py"
NAMESPACE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    "ip link set lo up && echo && exec sleep 3600",
)
ROLES = ("both", "prefill", "decode")
NUM_CLIENTS = 6
SECONDS = 900
"""For everything that starts several workers: they share the cores of a machine that may be busy."""

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::Warning"),  # Ray's own
]


@dataclass
class RayFleet:
    """The cluster, by the commands that a user runs on one of its nodes."""

    folder: Path
    inside: tuple[str, ...]
    """What runs a command in the namespace."""
    nodes: list[int] = field(default_factory=list)
    address: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "src"),
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "RAY_raylet_start_wait_time_s": "300",
        }

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `saccade` with *words* in the namespace."""
        command = (*self.inside, sys.executable, "-m", "saccade.cli.main", *words)
        return subprocess.Popen(command, env=self.environment, start_new_session=True)

    def fleet(self, *words: str) -> str:
        """Run `saccade fleet` with *words*, and return what it prints."""
        command = (*self.inside, sys.executable, "-m", "saccade.cli.main", "fleet", *words, "--ray", self.address)
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
        assert done.returncode == 0
        return done.stdout

    def apply(self, replicas: int = 2, names: Sequence[str] = ("tiny",), health_seconds: float = 1.0) -> None:
        """Apply a fleet of the three roles with the bundled model."""
        flags = ["--threads", "1", "--max-model-len", "512", "--kv-cache-memory-bytes", "32Mi"]
        flags += ["--served-model-name", *names]
        content = {
            "proxy_location": "Disabled",
            "applications": [
                {
                    "name": "saccade",
                    "import_path": "saccade.supervisor.ray_app:app",
                    "route_prefix": None,
                    "args": {
                        "worker_token_file": str(self.token),
                        "shutdown_timeout": 30,
                        "roles": dict.fromkeys(ROLES, flags),
                    },
                    "deployments": [
                        {
                            "name": role,
                            "num_replicas": replicas if role == "both" else 2,
                            "health_check_period_s": health_seconds,
                            "ray_actor_options": {"num_cpus": 1},
                        }
                        for role in ROLES
                    ],
                }
            ],
        }
        path = self.folder / "fleet.yaml"
        path.write_text(yaml.safe_dump(content, default_flow_style=None))
        self.fleet("apply", str(path))

    @property
    def token(self) -> Path:
        return self.folder / "worker.token"

    def workers(self) -> dict[str, list[psutil.Process]]:
        """The processes of `saccade worker` by role, without those that are zombies."""
        found = defaultdict(list)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "saccade.cli.main" in words and "worker" in words and str(self.token) in words:
                    found[words[words.index("--role") + 1] if "--role" in words else "both"].append(process)
        return found

    def pids(self) -> set[int]:
        return {process.pid for processes in self.workers().values() for process in processes}

    def is_whole(self, num_both: int = 2) -> bool:
        """Whether Serve says that all replicas run, and none is being stopped."""
        said = self.fleet("status")
        wanted = [f"{role}: {count} of {count} run" for role, count in zip(ROLES, (num_both, 2, 2), strict=True)]
        return "saccade: RUNNING" in said and all(line in said for line in wanted)


@contextlib.contextmanager
def running(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """End *process* after the block."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def ray_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    folder = Path("/tmp") / f"ray-{os.getpid()}"  # Ray puts sockets below it, whose paths must be short
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(running(subprocess.Popen(NAMESPACE, stdout=subprocess.PIPE)))
        assert holder.stdout is not None
        stack.callback(holder.stdout.close)
        holder.stdout.readline()
        inside = ("nsenter", "--target", str(holder.pid), f"--wdns={Path.cwd()}", "--user", "--net")
        fleet = RayFleet(folder, (*inside, "--preserve-credentials"))
        fleet.token.write_text("a-token-of-all-workers-of-a-test")
        fleet.token.chmod(0o600)
        cluster = subprocess.Popen(
            (*fleet.inside, sys.executable, str(NODES), "3"),
            env=fleet.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        try:
            said = json.loads(cluster.stdout.readline())
            fleet.address, fleet.nodes = said["address"], said["nodes"]
            yield fleet
        finally:
            cluster.stdin.close()
            cluster.stdout.close()
            cluster.wait(120)
            subprocess.run(("rm", "-r", str(folder)), check=True)


class Clients:
    """Six clients that chat at the gateway on the socket *uds* until the block ends."""

    def __init__(self, uds: Path) -> None:
        self.uds = uds
        self.num_answers = 0
        self.failures: list[str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._chat, args=(number,)) for number in range(NUM_CLIENTS)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _chat(self, number: int) -> None:
        turn = 0
        while not self._stopped.is_set():
            turn += 1
            try:
                answer = ask(self.uds, f"client {number} turn {turn}")
            except httpx2.HTTPError as error:
                self.failures.append(repr(error))
                continue
            if answer.status_code != 200 or not answer.json()["usage"]["completion_tokens"]:
                self.failures.append(answer.text)
            self.num_answers += 1


def ask(uds: Path, words: str) -> httpx2.Response:
    """Ask the gateway on the socket *uds*."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{words} " * 8}], "max_tokens": 4}
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(uds)), timeout=300) as client:
        return client.post("http://localhost/v1/chat/completions", json=body)


def num_ready(uds: Path) -> int:
    """How many workers the gateway on the socket *uds* has and can use."""
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(uds)), timeout=60) as client:
        lines = client.get("http://localhost/metrics").text.splitlines()
    return sum(line.startswith("saccade_worker_ready{") and line.endswith(" 1.0") for line in lines)


def wait_until(check: Callable[[], object]) -> None:
    """Return as soon as *check* is true; fail after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_fleet_of_three_roles_survives_what_happens_to_it(ray_fleet: RayFleet) -> None:  # F11
    fleet, file, uds = ray_fleet, ray_fleet.folder / "workers", ray_fleet.folder / "gateway.sock"
    fleet.apply()
    assert fleet.is_whole()
    first = fleet.pids()
    assert {role: len(found) for role, found in fleet.workers().items()} == dict.fromkeys(ROLES, 2)

    watching = fleet.start("fleet", "watch", "--workers-file", str(file), "--ray", fleet.address)
    wait_until(lambda: file.exists() and len(file.read_text().split()) == 6)
    gateway = ("gateway", "--workers-file", str(file), "--worker-token-file", str(fleet.token), "--uds", str(uds))
    with running(watching), running(fleet.start(*gateway, "--decode-processes", "1")):
        wait_until(uds.exists)
        wait_until(lambda: num_ready(uds) == 6)
        wait_until(lambda: ask(uds, "hello").status_code == 200)  # the gateway tries the model's files first

        # The command that watches is killed: the fleet goes on, and the next one finds it.
        watching.kill()
        watching.wait()
        assert fleet.is_whole()
        assert fleet.pids() == first
        with running(fleet.start("fleet", "watch", "--workers-file", str(file), "--ray", fleet.address)) as again:
            # A worker dies: another one takes its place.
            fleet.workers()["both"][0].kill()
            wait_until(lambda: len(fleet.pids() - first) == 1 and len(fleet.pids()) == 6)
            # A replica's process dies, and its worker with it.
            second = fleet.pids()
            victim = fleet.workers()["decode"][0]
            victim.parent().kill()
            wait_until(lambda: not victim.is_running())
            wait_until(lambda: len(fleet.pids() - second) == 1 and len(fleet.pids()) == 6)
            wait_until(fleet.is_whole)

            # Another number: nothing else is restarted.
            third = fleet.pids()
            fleet.apply(replicas=1)
            wait_until(lambda: len(fleet.pids()) == 5)
            assert fleet.pids() < third
            fourth = fleet.pids()
            fleet.apply(replicas=2)
            assert fleet.is_whole()
            assert fourth < fleet.pids()

            # Other flags: every worker is replaced, and no request fails.
            wait_until(lambda: num_ready(uds) == 6)
            fifth = fleet.pids()
            with Clients(uds) as clients:
                wait_until(lambda: clients.num_answers >= NUM_CLIENTS)
                fleet.apply(names=("tiny", "other"))
                before = clients.num_answers
                wait_until(lambda: clients.num_answers >= before + NUM_CLIENTS)
            print(f"rolling update: {clients.num_answers} answers, {len(clients.failures)} failures")
            assert clients.failures == []
            wait_until(fleet.is_whole)
            assert not fleet.pids() & fifth
            assert len(fleet.pids()) == 6

            # A node dies: its workers start on the other one as far as there is room.
            os.kill(fleet.nodes[1], signal.SIGKILL)
            wait_until(lambda: len(fleet.pids()) == 3 and len(file.read_text().split()) == 3)
            assert ask(uds, "one node is left").status_code == 200

            fleet.fleet("delete")
            assert fleet.pids() == set()
            wait_until(lambda: file.read_text() == "# no worker\n")
            assert again.poll() is None
    assert not [one for one in processes_of(fleet) if "ServeController" in one or "ServeReplica" in one]


def processes_of(fleet: RayFleet) -> list[str]:
    """The titles of the processes whose environment names this cluster."""
    titles = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == str(fleet.folder):
                titles.append(" ".join(process.cmdline()))
    return titles
