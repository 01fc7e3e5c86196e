"""Runs workers on the nodes of a Ray cluster. Ray places and restarts them; requests and images never go through Ray.

A replica is an actor in its own placement group. The actor runs `saccade worker` as a child process and ends with it.
Ray then starts the actor again, on another node if its node is gone. Only strings pass between the nodes.
"""

import ipaddress
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from saccade import config
from saccade.errors import StartupError
from saccade.processes.parent_death import tied
from saccade.transport.wire import target

LEAST_LIFE_SECONDS = 10.0
"""A worker that ends sooner is not started again before this time has passed."""

ANSWER_SECONDS = 5.0
"""How long a replica may take to report its address; if its node is gone, Ray may take longer to notice."""

CONNECT_SECONDS = 5.0
SCHEME = "grpc://"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaSpec:
    """A replica: the arguments of `saccade worker` without an address, and the resources that it needs on its node.

    After SIGTERM it has *stop_seconds* to exit before it is killed.
    """

    arguments: tuple[str, ...]
    resources: Mapping[str, float]
    stop_seconds: float


class WorkerActor:
    """The actor of a replica. It runs `saccade worker` on a free port of its node, and ends when the worker ends."""

    def __init__(self, arguments: Sequence[str]) -> None:
        host = get_node_ip_address()
        port = _free_port(host)
        address = f"[{host}]" if ":" in host else host
        self._url = f"{SCHEME}{address}:{port}"
        self._stopping = False
        command, environment = config.program("worker", *arguments, "--host", host, "--port", str(port))
        # Ray runs this in the process's main thread. The child's death is tied to that thread's end.
        self._process = subprocess.Popen(tied(command, SIGTERM), stdin=subprocess.DEVNULL, env=environment)
        threading.Thread(target=self._end_with_it, name="wait for the worker", daemon=True).start()

    def url(self) -> str:
        """Return the address of the worker, which may still be starting."""
        return self._url

    def stop(self, seconds: float) -> None:
        """Let the worker drain, and kill it if it still runs after *seconds*."""
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _end_with_it(self) -> None:
        started_at = time.monotonic()
        self._process.wait()
        time.sleep(max(0.0, LEAST_LIFE_SECONDS - (time.monotonic() - started_at)))
        if not self._stopping:
            os._exit(1)


def _free_port(host: str) -> int:
    """Return a port of *host* that is free now. A worker that finds the port in use ends, and is started again."""
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def _address(answer: object) -> str | None:
    """Return *answer* if it is a worker's address and fits on a line of the file; otherwise None."""
    if not isinstance(answer, str) or not answer.startswith(SCHEME) or not answer.isprintable() or " " in answer:
        logger.error("a replica does not report an address of a worker")
        return None
    try:
        target(answer)
    except StartupError as error:
        logger.error("a replica reports an address that is none: %s", error.message)
        return None
    return answer


class _Replica:
    """A placement group with an actor, and the pending call that asks for the actor's address."""

    def __init__(self, spec: ReplicaSpec) -> None:
        resources = dict(spec.resources)
        self.group = placement_group([resources], strategy="STRICT_PACK")
        actor_class: Any = ray.remote(WorkerActor)
        self.actor = actor_class.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0),
        ).remote(list(spec.arguments))
        self.url: str | None = None
        self._question: Any = None
        self._asked_at = 0.0

    def look(self) -> None:
        """Update the url, which is None while the replica has no node, or while Ray restarts its actor."""
        if self._question is None:
            self._question = self.actor.url.remote()
            self._asked_at = time.monotonic()
        answered, _ = ray.wait([self._question], timeout=0.2)
        if not answered:
            if time.monotonic() - self._asked_at > ANSWER_SECONDS:
                self.url = None
            return
        try:
            self.url = _address(ray.get(self._question))
        except RayError:
            self.url = None
        self._question = None


class RayFleet:
    """Runs *num_replicas* workers of *spec* on the cluster at *address*, until close(). Raises StartupError."""

    def __init__(self, address: str, spec: ReplicaSpec, num_replicas: int) -> None:
        join(address)
        self._spec = spec
        self._replicas = [_Replica(spec) for _ in range(num_replicas)]

    def urls(self) -> tuple[str, ...]:
        """Return the current addresses of the workers; some may still be starting."""
        for replica in self._replicas:
            replica.look()
        return tuple(replica.url for replica in self._replicas if replica.url is not None)

    def close(self) -> None:
        """Let all workers drain, and release their resources."""
        seconds = self._spec.stop_seconds
        stopping = [replica.actor.stop.remote(seconds) for replica in self._replicas if replica.url is not None]
        try:
            ray.wait(stopping, num_returns=len(stopping), timeout=seconds + ANSWER_SECONDS) if stopping else None
            for replica in self._replicas:
                ray.kill(replica.actor)
                remove_placement_group(replica.group)
        except RayError:
            logger.warning("the cluster is gone, and the workers with it")
        ray.shutdown()


def join(address: str) -> None:
    """Connect to the cluster at *address*, unless connected. Raises StartupError."""
    if ray.is_initialized():
        return
    try:
        if address != "auto":
            # Ray itself would retry for minutes if nobody listens.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, namespace="saccade", log_to_driver=False, configure_logging=False)
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise StartupError(
            f"There is no Ray cluster at {address}: start one with `ray start --head`, and pass its HOST:PORT as --ray."
        ) from error


def has_gpus() -> bool:
    """Whether any node of the cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU"))
