"""`saccade fleet`: workers on the nodes of a Ray cluster, and a file of their addresses for gateways."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from saccade.cli.flags import LogLevel
from saccade.errors import NotInstalled, StartupError
from saccade.log_setup import configure_logging

if TYPE_CHECKING:
    from saccade.supervisor.ray_cluster import FleetStatus
    from saccade.supervisor.ray_directory import Listing

LOOK_SECONDS = 1.0
"""Between two looks at the directory, or at the state of a change."""

logger = logging.getLogger(__name__)


def fleet(
    action: Literal["apply", "status", "delete", "watch"],
    file: Path | None = None,
    *,
    ray: str = "auto",
    name: str = "saccade",
    workers_file: Path | None = None,
    wait: bool = True,
    log_level: LogLevel = "INFO",
) -> None:
    """Run workers on a Ray cluster, and keep a file of their addresses for `saccade gateway --workers-file`.

    Run it on a node of the cluster. The fleet goes on without it.

    Parameters
    ----------
    action
        apply makes the cluster's fleets those of FILE; status shows them; delete ends one; watch keeps a file of a
        fleet's workers.
    file
        The fleets, in the format of `serve deploy`; for apply.
    ray
        The address of the Ray cluster, HOST:PORT, or auto for that of this node.
    name
        The fleet to delete or to watch: the name of its application.
    workers_file
        The file to write; gateways watch it. For watch.
    wait
        Whether apply and delete return only when the workers are there, or gone.
    log_level
        The least level that is logged.
    """
    if (action == "apply") != (file is not None):
        raise StartupError(f"`saccade fleet {action}` takes {'the FILE to apply' if action == 'apply' else 'no FILE'}.")
    if (action == "watch") != (workers_file is not None):
        raise StartupError("`saccade fleet watch` needs --workers-file, and no other action takes it.")
    try:
        from saccade.supervisor import ray_cluster
    except ImportError as error:
        raise NotInstalled("`saccade fleet` needs Ray: pip install 'saccade-vlm[ray]', on every node too.") from error
    schema = ray_cluster.read_file(file) if file is not None else None
    ray_cluster.join(ray)
    configure_logging(logging.getLevelNamesMapping()[log_level])
    if schema is not None:
        ray_cluster.apply(schema)
        names = {application.name for application in schema.applications}
        if wait:
            _wait_until_running(lambda: [one for one in ray_cluster.statuses() if one.name in names])
    elif action == "status":
        for status in list(ray_cluster.statuses()):
            print(_describe(status, ray_cluster.list_workers(ray, status.name)))
    elif action == "delete":
        if not ray_cluster.delete(name):
            raise StartupError(f"There is no fleet {name} on this cluster; `saccade fleet status` lists all.")
        while wait and any(status.name == name for status in ray_cluster.statuses()):
            time.sleep(LOOK_SECONDS)
        if wait:
            ray_cluster.shut_down_if_empty()
    elif workers_file is not None:
        keep_file(lambda: ray_cluster.list_workers(ray, name), workers_file.expanduser().absolute())


def _wait_until_running(look: "Callable[[], list[FleetStatus]]") -> None:
    """Wait until all fleets that *look* returns are as their file wants them. Raises StartupError if one cannot be."""
    last = ""
    while True:
        statuses = look()
        if (text := "\n".join(_describe(status, None) for status in statuses)) != last:
            logger.info("%s", text)
            last = text
        if all(status.is_settled for status in statuses):
            break
        time.sleep(LOOK_SECONDS)
    for status in statuses:
        if not status.is_running:
            raise StartupError(f"The fleet {status.name} is {status.state}: {_reason(status)}")


def _describe(status: "FleetStatus", listing: "Listing | None") -> str:
    """Return the lines that show *status*, with the urls in *listing* if it is there."""
    lines = [f"{status.name}: {status.state}"]
    for role in status.roles:
        urls = ", ".join(listing.urls.get(role.role, ())) if listing is not None else ""
        lines.append(f"  {role.role}: {role.num_running} of {role.num_replicas} run {urls}".rstrip())
    if not status.is_running and (reason := _reason(status)):
        lines.append(f"  {reason}")
    return "\n".join(lines)


def _reason(status: "FleetStatus") -> str:
    """Return what Serve says about *status*, without the traceback in which it quotes an error of a worker."""
    said = [status.message, *(role.message for role in status.roles)]
    lines = [line.strip() for text in said for line in text.splitlines() if line.strip()]
    errors = [line.partition("StartupError: ")[2] for line in lines if "StartupError: " in line]
    return (errors or lines or [""])[-1]


def keep_file(look: "Callable[[], Listing | None]", path: Path) -> None:
    """Write the workers' addresses to *path* whenever they change, until a signal; the file then stays as it is."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    last_urls: tuple[str, ...] | None = None
    while True:
        listing = look()
        if listing is not None:
            urls = tuple(sorted(url for urls in listing.urls.values() for url in urls))
            if not listing.complete:
                # A new directory has not heard of all of them yet.
                urls = tuple(sorted({*urls, *(last_urls or ())}))
            if urls != last_urls and (urls or listing.complete):
                _write(path, urls)
                last_urls = urls
                logger.info("%d workers: %s", len(urls), ", ".join(urls) or "none")
        if stopped.wait(LOOK_SECONDS):
            return


def _write(path: Path, urls: tuple[str, ...]) -> None:
    """Replace the file atomically, so that no gateway reads half of it. Raises StartupError."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        # With the rights of any new file: a gateway may run as another user.
        part.write_text("".join(f"{line}\n" for line in urls or ("# no worker",)))
        part.replace(path)
    except OSError as error:
        raise StartupError(f"--workers-file {path} cannot be written: {error.strerror}.") from error
