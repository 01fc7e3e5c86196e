"""The error message and the log for requests whose results are NaN or infinite."""

import time

import structlog

LOG_SECONDS = 10.0
"""Time between two lines: a damaged model has such values in every request."""

MESSAGE = (
    "The model computed values for this request that are not numbers (NaN or infinity), so it has no answer. If that "
    "happens again, the operator of this server should look at the model and its worker."
)

logger = structlog.get_logger(__name__)


class NonFiniteLog:
    """Logs the ids of requests with values that are not finite, in at most one line per LOG_SECONDS."""

    def __init__(self) -> None:
        self._log_after = 0.0
        self._num_left_out = 0

    def note(self, request_id: str, place: str) -> None:
        """Log a request, or count it for the next line; *place* says where the values were found."""
        now = time.monotonic()
        if now < self._log_after:
            self._num_left_out += 1
            return
        logger.error(
            "the model computed values that are not finite",
            request_id=request_id,
            place=place,
            num_left_out=self._num_left_out,
        )
        self._log_after, self._num_left_out = now + LOG_SECONDS, 0
