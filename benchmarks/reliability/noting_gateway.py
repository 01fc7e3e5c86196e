"""`saccade gateway` that notes each request of a batch before it asks for it.

`python -m benchmarks.reliability.noting_gateway FILE SECONDS gateway ...`: a line of FILE is a plus and the hash of a
request's body; with a minus, it was not served and will be asked for again. The lease of a batch lasts SECONDS.
"""

import os
import sys
from typing import Any

from blake3 import blake3

from saccade.cli.main import main
from saccade.errors import RateLimitExceeded
from saccade.gateway.apis.batches import store
from saccade.gateway.apis.batches.runner import TRIED_AGAIN, BatchRunner


def note_requests(file: str) -> None:
    """Have all batches of this process noted in *file*."""
    notes, ask = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), BatchRunner._ask

    async def noted(self: BatchRunner, endpoint: str, body: bytes, account: Any) -> tuple[bytes, str]:
        name = blake3(body).hexdigest(8).encode()
        os.write(notes, b"+%b\n" % name)
        try:
            return await ask(self, endpoint, body, account)
        except (*TRIED_AGAIN, RateLimitExceeded):
            os.write(notes, b"-%b\n" % name)
            raise

    BatchRunner._ask = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    file, seconds, *arguments = sys.argv[1:]
    note_requests(file)
    store.LEASE_SECONDS = int(seconds)  # type: ignore[misc]
    sys.argv[1:] = arguments
    sys.exit(main())
