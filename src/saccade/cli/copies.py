"""The workers of `saccade serve`: one for each copy of the model, each with its share of the machine."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from saccade.cli import exit_codes
from saccade.engine.config import EngineSettings
from saccade.engine.gpu_devices import num_gpus
from saccade.errors import StartupError
from saccade.supervisor.tree import ChildSpec
from saccade.supervisor.worker_child import worker_child

THREADS, VISIBLE = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


def workers_of_copies(
    model: str, sockets: Sequence[Path], engine: EngineSettings, log_level: str, shutdown_timeout_seconds: float
) -> list[ChildSpec]:
    """Return a worker of *model* for each of *sockets*; several workers share the GPUs, or the CPU's threads.

    Raises StartupError if there are fewer GPUs than they take.
    """
    variables = gpus_of_copies(engine, len(sockets), num_gpus())
    own = dataclasses.replace(engine, threads=threads_of_copy(engine, len(sockets)))
    workers = []
    for number, socket in enumerate(sockets):
        child = worker_child(model, socket, own, log_level, shutdown_timeout_seconds, exit_codes.WITH_MESSAGE)
        name = child.name if len(sockets) == 1 else f"{child.name} {number + 1} of {len(sockets)}"
        environment = {**(child.environment or os.environ), **variables[number]}
        workers.append(dataclasses.replace(child, name=name, environment=environment, ends_with_previous=number > 0))
    return workers


def threads_of_copy(engine: EngineSettings, num_copies: int) -> int | None:
    """Return the threads for each of *num_copies*, or None for the engine's default.

    If the user has chosen no number, several copies share the machine's cores.
    """
    if num_copies == 1 or engine.threads is not None or THREADS in os.environ:
        return engine.threads
    return max(1, (len(os.sched_getaffinity(0)) - 1) // num_copies)


def gpus_of_copies(engine: EngineSettings, num_copies: int, num_gpus: int) -> list[Mapping[str, str]]:
    """Return the variables that give each of *num_copies* its own GPUs; none for a single copy, or without GPUs.

    Raises StartupError if there are not enough.
    """
    if num_copies == 1 or engine.device == "cpu" or not num_gpus:
        return [{}] * num_copies
    each = engine.tensor_parallel_size
    visible = os.environ.get(VISIBLE)
    names = [str(number) for number in range(num_gpus)] if visible is None else visible.split(",")
    if num_copies * each > len(names):
        raise StartupError(
            f"--data-parallel-size {num_copies} with --tensor-parallel-size {each} takes {num_copies * each} GPUs; "
            f"there are {len(names)}."
        )
    return [{VISIBLE: ",".join(names[number * each : (number + 1) * each])} for number in range(num_copies)]
