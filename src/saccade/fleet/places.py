"""How many samples the workers of a model may get from this process of the gateway, and how many they compute."""

from saccade.fleet.pool import Model
from saccade.fleet.roles import first_workers
from saccade.fleet.settings import DispatchLimits
from saccade.fleet.worker import Worker

UNBOUNDED = 1 << 30
"""Places and rows at a worker without siblings."""


def num_places(limits: DispatchLimits, model: Model, worker: Worker) -> int:
    """Return how many samples *worker* may get: those that it computes, and some that it queues."""
    queue = limits.worker_queue if len(model.workers) > 1 else limits.lone_worker_queue
    return UNBOUNDED if queue is None else -(-(_num_computed(worker) + queue) // limits.num_processes)


def rows_of(limits: DispatchLimits, model: Model) -> dict[str, int]:
    """Return, by url, how many samples each worker of *model* computes, if requests go to it first.

    At a worker that takes everything, all places count. They also do at one that computes a single sample: many of
    those do not report how many they compute.
    """
    rows = {}
    for worker in first_workers(model.workers):
        places = num_places(limits, model, worker)
        is_known = _num_computed(worker) > 1 and places < UNBOUNDED
        rows[worker.url] = -(-_num_computed(worker) // limits.num_processes) if is_known else places
    return rows


def _num_computed(worker: Worker) -> int:
    return worker.state.description.max_num_seqs if worker.state.description else 1
