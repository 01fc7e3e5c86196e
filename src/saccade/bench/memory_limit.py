"""How long this machine takes to read the weights that a token needs: the least that a token takes.

A server says in its /metrics how many bytes a step with one token reads. They tell something about the time only if
the server computes on this machine's processor, so both the server and its workers must be local.
"""

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np

from saccade.loopback import is_loopback

STEP_BYTES = re.compile(r'^saccade_step_weight_bytes\{[^}\n]*worker="([^"\n]*)"[^}\n]*\} (\S+)$', re.MULTILINE)
TOTAL_BYTES = 1 << 29
"""More than fits into a processor's caches."""

REPEATS = 5


def local_step_bytes(root: str, metrics: str) -> int:
    """Return the bytes that a step with one token reads on this machine, by the *metrics* of the server at *root*.

    0 if the server does not say it, if its workers differ, or if one of them may be on another machine.
    """
    workers = STEP_BYTES.findall(metrics)
    numbers = {int(float(number)) for _, number in workers}
    are_local = all(map(is_local, (root, *(worker for worker, _ in workers))))
    return numbers.pop() if are_local and len(numbers) == 1 else 0


def is_local(url: str) -> bool:
    """Return whether *url* is a Unix socket or a loopback address."""
    parts = urlsplit(url if "://" in url or url.startswith("unix:") else f"//{url}")
    return parts.scheme == "unix" or is_loopback(parts.hostname or "")


def bandwidth() -> float:
    """Return the bytes a second that all cores together read from memory."""
    num_threads = os.cpu_count() or 1
    # Ones, because pages that were never written would all be one page of zeros.
    parts = [np.ones(TOTAL_BYTES // 4 // num_threads, np.float32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as threads:

        def seconds() -> Iterator[float]:
            for _ in range(REPEATS):
                began = time.perf_counter()
                list(threads.map(np.dot, parts, parts))
                yield time.perf_counter() - began

        return sum(part.nbytes for part in parts) / min(seconds())
