"""`saccade fleet`: workers on the nodes of a Ray cluster, and a file of their addresses for gateways."""

import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from saccade import config
from saccade.cli.flags import ENGINE, OWN, LogLevel
from saccade.config import Count
from saccade.engine.config import EngineSettings
from saccade.errors import StartupError
from saccade.log_setup import configure_logging
from saccade.transport.credentials import read_token

if TYPE_CHECKING:
    from saccade.supervisor.ray_fleet import RayFleet

LOOK_SECONDS = 1.0
"""Between two checks of the workers' addresses."""

KILL_SECONDS = 10.0
"""A worker that has not ended this long after its --shutdown-timeout is killed."""

logger = logging.getLogger(__name__)


def fleet(
    model: str | None = None,
    *,
    ray: str,
    workers_file: Path,
    worker_token_file: Path,
    replicas: Count = 1,
    shutdown_timeout: Annotated[float, Parameter(validator=Number(gte=0))] = 30.0,
    engine: EngineSettings = ENGINE,
    log_level: LogLevel = "INFO",
) -> None:
    """Run workers on a Ray cluster, and keep a file of their addresses for `saccade gateway --workers-file`.

    Parameters
    ----------
    model
        A folder in hub layout that every node has at this path, or a hub id; without it, the bundled model.
    ray
        The address of the Ray cluster, HOST:PORT, or auto on one of its nodes.
    workers_file
        The file to write; gateways watch it.
    worker_token_file
        The file with the workers' token; every node needs it at this path.
    replicas
        The number of workers.
    shutdown_timeout
        Seconds that running requests get to finish when a worker stops.
    log_level
        The least level that is logged.
    """
    token_file = worker_token_file.expanduser().absolute()
    read_token(token_file)
    try:
        from saccade.supervisor import ray_fleet
    except ImportError as error:
        raise StartupError("`saccade fleet` needs Ray: pip install 'saccade-vlm[ray]', on every node too.") from error
    ray_fleet.join(ray)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    configure_logging(logging.getLevelNamesMapping()[log_level])
    spec = ray_fleet.ReplicaSpec(
        arguments=worker_arguments(model, token_file, shutdown_timeout, engine, log_level),
        resources=_resources(engine, has_gpus=ray_fleet.has_gpus()),
        stop_seconds=shutdown_timeout + KILL_SECONDS,
    )
    path = workers_file.expanduser().absolute()
    _write(path, ())
    running = ray_fleet.RayFleet(ray, spec, replicas)
    try:
        _keep_up(running, path, replicas, stopped)
    finally:
        _write(path, ())
        running.close()


def _keep_up(running: "RayFleet", path: Path, replicas: int, stopped: threading.Event) -> None:
    """Write the addresses of the workers to *path* whenever they have changed."""
    last_urls: tuple[str, ...] = ()
    while not stopped.wait(LOOK_SECONDS):
        urls = running.urls()
        if urls != last_urls:
            _write(path, urls)
            last_urls = urls
            logger.info("%d of %d workers have a node: %s", len(urls), replicas, ", ".join(urls) or "none")


def worker_arguments(
    model: str | None, token_file: Path, shutdown_timeout: float, engine: EngineSettings, log_level: LogLevel
) -> tuple[str, ...]:
    """Return the arguments of `saccade worker`, without the address. Without a *model* it serves the bundled one."""
    if model is not None and (folder := Path(model).expanduser()).is_dir():
        model = str(folder.absolute())
    return (
        *(() if model is None else (model,)),
        *(word for name in engine.served_model_name for word in ("--served-model-name", name)),
        "--worker-token-file",
        str(token_file),
        "--shutdown-timeout",
        str(shutdown_timeout),
        "--no-summary",
        "--log-level",
        log_level,
        *config.to_arguments(engine, OWN),
    )


def _resources(engine: EngineSettings, *, has_gpus: bool) -> dict[str, float]:
    """Return a worker's resources in Ray's terms: a GPU for each of its processes, or else their CPU threads."""
    if has_gpus and engine.device != "cpu":
        return {"GPU": engine.tensor_parallel_size, "CPU": 1}
    return {"CPU": engine.tensor_parallel_size * (engine.threads or 1)}


def _write(path: Path, urls: tuple[str, ...]) -> None:
    """Replace the file atomically, so that no gateway reads half of it. Raises StartupError."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        # With the rights of any new file: a gateway may run as another user.
        part.write_text("".join(f"{line}\n" for line in urls or ("# no worker",)))
        part.replace(path)
    except OSError as error:
        raise StartupError(f"--workers-file {path} cannot be written: {error.strerror}.") from error
