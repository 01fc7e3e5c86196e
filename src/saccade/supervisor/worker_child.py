"""Runs the worker as a child on a private socket, for `saccade serve` and for callers in Python."""

from collections.abc import Collection
from pathlib import Path

from saccade import config
from saccade.engine.config import EngineSettings
from saccade.supervisor.tree import ChildSpec


def worker_child(
    model: str | None,
    socket: Path,
    engine: EngineSettings,
    log_level: str = "WARNING",
    shutdown_timeout_seconds: float = 0.0,
    error_codes: Collection[int] = (),
) -> ChildSpec:
    """Return the ChildSpec of a worker that serves *model*, or the bundled one if that is None, on *socket*.

    If a signal reaches all processes, the worker drains by itself for at most *shutdown_timeout_seconds*. If its
    gateway ends first, the worker has no open requests left.
    """
    names = [] if model is None else [model]
    flags = ("--uds", str(socket), "--shutdown-timeout", str(shutdown_timeout_seconds), "--log-level", log_level)
    command, environment = config.program("worker", *names, *flags, "--no-summary", settings=[engine])
    return ChildSpec(name="worker", command=command, environment=environment, error_codes=error_codes)
