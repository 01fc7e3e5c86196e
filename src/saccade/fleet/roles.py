"""Which workers a request can go to by their roles: first, and then to continue it."""

from collections.abc import Hashable, Sequence

from saccade.fleet.worker import Worker
from saccade.protocol.description import Description
from saccade.transport.named_addresses import may_be_of_worker


def first_workers(workers: Sequence[Worker]) -> Sequence[Worker]:
    """Return the workers that a request can go to first: prefill workers and workers that serve alone.

    If there are none, return the decode workers: a worker of any role can serve alone.
    """
    return [worker for worker in workers if not is_decoder(worker.state.description)] or workers


def is_decoder(description: Description | None) -> bool:
    """Return whether a worker continues requests that another one has begun."""
    return description is not None and description.role == "decode"


def sends_kv(worker: str, description: Description) -> bool:
    """Return whether decode workers can get KV state from the worker with this url.

    They connect to the address that it reports, so that address must be its own.
    """
    address = description.kv_transfer_address
    return address is not None and may_be_of_worker(address, worker)


def kv_form(description: Description) -> Hashable:
    """Return what two workers must have in common to exchange KV state."""
    return description.fingerprint, description.block_size, description.dtype, description.kv_cache_dtype
