"""Workers and gateways of a fleet as real processes, and what a gateway says of itself on its two ports."""

import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.measured import MODEL, free_ports, process

READY_SECONDS = 120.0
IDLE_SECONDS = 0.4
"""Events of the caches arrive within less."""

REQUEST_SECONDS = 30.0
ADMIN_KEY = "operator"
HIT_RATE = "saccade_router_kv_hit_rate"
SACCADE = (sys.executable, "-m", "saccade.cli.main")
BROKEN = (sys.executable, "-m", "benchmarks.fleet.broken_gateway")
"""A gateway that computes other keys for the same prompts than the workers do."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class NotMeasured(Exception):
    """What should have been measured cannot be known: a run that ends so has failed."""


@dataclass(frozen=True)
class HitRates:
    """The histogram of hit rates: its count and its sum."""

    count: float
    total: float


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs, and the file its log goes to."""

    port: int
    admin_port: int
    log: Path
    pid: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def workers(self) -> list[Any]:
        """What GET /workers says of each worker. Raises NotMeasured."""
        return list(json.loads(_ask(f"{self.admin_url}/workers"))["workers"])

    def route(self, chat: object) -> Any:
        """What POST /route says of *chat*. Raises NotMeasured."""
        return json.loads(_ask(f"{self.admin_url}/route", json.dumps(chat).encode()))

    def reset(self) -> None:
        """Empty the caches of images and blocks. Raises NotMeasured."""
        for cache in ("mm", "prefix"):
            _ask(f"{self.admin_url}/reset_{cache}_cache", b"")

    def hit_rates(self) -> HitRates:
        """Read the histogram of all gateway processes together. Raises NotMeasured where /metrics does not have it."""
        samples: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(_ask(f"{self.url}/metrics").decode()):
            for sample in family.samples if family.name == HIT_RATE else ():
                samples[sample.name] += sample.value
        samples.default_factory = None
        try:
            return HitRates(samples[f"{HIT_RATE}_count"], samples[f"{HIT_RATE}_sum"])
        except KeyError as error:
            raise NotMeasured(f"/metrics has no {HIT_RATE}") from error

    def exact_in_log(self) -> set[str]:
        """The workers that the log calls EXACT."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return {line["worker"] for line in lines if " are EXACT" in line["event"]}

    def wait_until_exact(self) -> None:
        """Wait until every worker is known. Raises NotMeasured."""
        deadline = time.monotonic() + READY_SECONDS
        while any(worker["exactness"] != "EXACT" for worker in self.workers()):
            if time.monotonic() > deadline:
                raise NotMeasured(f"a worker is not EXACT: {self.workers()}")
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Wait until no request is open and what the workers are known to hold stands still. Raises NotMeasured."""
        deadline = time.monotonic() + READY_SECONDS
        seen, known = None, self._known()
        while known != seen or any(requests for requests, _ in known):
            if time.monotonic() > deadline:
                raise NotMeasured(f"the fleet does not come to rest: {known}")
            time.sleep(IDLE_SECONDS)
            seen, known = known, self._known()

    def _known(self) -> list[tuple[int, Any]]:
        return [(worker["booked"]["requests"], worker["holdings"]) for worker in self.workers()]

    def is_ready(self) -> bool:
        """Whether /ready answers 200."""
        with contextlib.suppress(NotMeasured):
            return bool(_ask(f"{self.url}/ready"))
        return False


@contextlib.contextmanager
def workers(folder: Path, count: int, logs: Path, flags: Sequence[str] = ()) -> Iterator[list[str]]:
    """Run *count* workers of the model in *folder* until the block ends; yield their URLs. Logs go to *logs*."""
    with contextlib.ExitStack() as running:
        urls = []
        for number in range(count):
            socket = logs / f"worker-{number}" / "w.sock"
            log = running.enter_context((logs / f"worker-{number}.log").open("wb"))
            command = [*SACCADE, "worker", str(folder), "--uds", str(socket), "--served-model-name", MODEL]
            running.enter_context(process([*command, "--dtype", "float32", *flags], log.fileno(), ENVIRONMENT))
            urls.append(f"unix:{socket}")
        yield urls


@contextlib.contextmanager
def gateway(
    urls: Sequence[str], policy: str, log: Path, more: Sequence[str] = (), *, program: Sequence[str] = SACCADE
) -> Iterator[Gateway]:
    """Run a gateway over *urls*, with *more* flags, until the block ends; it is ready and knows every worker.

    *program* takes the arguments of `saccade`. Raises NotMeasured.
    """
    port, admin_port = free_ports(2)
    flags = ["--port", str(port), "--admin-port", str(admin_port), "--admin-key", ADMIN_KEY, "--decode-processes", "1"]
    command = [*program, "gateway", *flags, "--routing-policy", policy]
    named = [word for url in urls for word in ("--worker-url", url)]
    with log.open("wb") as file, process([*command, *named, *more], file.fileno(), ENVIRONMENT) as started:
        running = Gateway(port, admin_port, log, started.pid)
        deadline = time.monotonic() + READY_SECONDS
        while not running.is_ready():
            if started.poll() is not None or time.monotonic() > deadline:
                raise NotMeasured(f"the gateway did not become ready; {log} tells more")
            time.sleep(0.1)
        # A lone worker is not asked what it holds.
        if len(urls) > 1:
            running.wait_until_exact()
        yield running


def _ask(url: str, body: bytes | None = None) -> bytes:
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=REQUEST_SECONDS) as response:
            return bytes(response.read())
    except (urllib.error.URLError, OSError) as error:
        raise NotMeasured(f"{url} cannot be read: {error}") from error
