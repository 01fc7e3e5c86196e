"""A replica of Ray Serve that runs a worker. Requests do not pass it: gateways connect to the worker itself.

Serve calls the methods of RayWorker: it constructs one, checks its health, asks for its load, and deletes it. A replica
and its worker end together. The worker is tied to the replica by a socket, because Serve runs all this in a thread of a
pool, whose end would be taken for the death of the parent.
"""

import asyncio
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util import get_node_ip_address

from saccade import config
from saccade.connectors.context import ClientContext
from saccade.connectors.native.client import WorkerClient
from saccade.errors import StartupError
from saccade.processes.parent_socket import Failed, read_report, start_tied
from saccade.processes.supervision import ending
from saccade.supervisor.ray_directory import RENEW_SECONDS
from saccade.supervisor.ray_fleet import DIRECTORY, SETTLE_SECONDS, FleetSpec, RoleSpec
from saccade.supervisor.ray_node import end_with_node
from saccade.supervisor.ray_scaling import WAITING_TOKENS
from saccade.transport import lasting_task
from saccade.transport.credentials import WorkerCredentials, read_token

ANSWER_SECONDS = 5.0
"""How long the directory may take to answer."""

logger = logging.getLogger(__name__)


class RayWorker:
    """A worker of *role* of the fleet *spec*, on this replica's node."""

    _client: WorkerClient | None = None
    _renewing: asyncio.Task[None] | None = None

    async def __init__(self, spec: FleetSpec, role: RoleSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        """Return once the worker serves and is in the directory. Raises StartupError."""
        end_with_node()
        spec.check_release()
        credentials = WorkerCredentials(token=read_token(Path(spec.worker_token_file)))
        self._spec, self._role = spec, role
        command, environment = config.program("worker", *spec.worker_words(role, get_node_ip_address()))
        self._process, ours = start_tied(command, environment)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        report = await read_report(self._reader)
        if report is None:
            code = await asyncio.to_thread(self._process.wait)
            raise StartupError(f"The worker {ending(code)} before it was ready.")
        if isinstance(report, Failed):
            raise StartupError(report.sentence)
        self._url = report.url
        self._client = WorkerClient(self._url, ClientContext(credentials=credentials))
        await self._client.start()
        self._directory: Any = serve.get_deployment_handle(DIRECTORY, serve.get_replica_context().app_name)
        await self._directory.renew.remote(role.role, self._url)
        self._renewing = lasting_task.begin(self._renew, "entry in the directory")

    async def check_health(self) -> None:
        """Ask the worker to describe itself. Raises WorkerUnavailable; Serve replaces the replica after three times."""
        if self._client is not None:
            await self._client.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what saccade.supervisor.ray_scaling decides by."""
        load = self._client.load if self._client is not None else None
        return {WAITING_TOKENS: float(load.num_waiting_tokens) if load is not None else 0.0}

    async def __del__(self) -> None:
        """Leave the directory; once gateways know that, let the worker drain, and kill it if that takes too long.

        Serve awaits this when it stops the replica, which may still be starting.
        """
        await lasting_task.end(self._renewing)
        if self._client is not None:
            await self._tell_directory("leave", self._url)
            await asyncio.sleep(SETTLE_SECONDS)
            await self._client.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, self._spec.stop_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._writer.close()

    async def _renew(self) -> None:
        """Keep the worker in the directory for as long as it runs; then end this replica, which Serve replaces."""
        while self._process.poll() is None:
            await self._tell_directory("renew", self._role.role, self._url)
            await asyncio.sleep(RENEW_SECONDS)
        logger.error("The worker %s, and its replica ends.", ending(self._process.returncode))
        os._exit(1)

    async def _tell_directory(self, method: str, *words: str) -> None:
        """Call a *method* of the directory. Serve may be replacing it: then the next call, or the lease's end, does."""
        try:
            await asyncio.wait_for(getattr(self._directory, method).remote(*words), ANSWER_SECONDS)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the directory does not answer: %s", type(error).__name__)
