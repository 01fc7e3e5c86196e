"""Logs which settings refuse image URLs. The log contains no client data, and does not list every refusal."""

from collections import Counter

import structlog

_logger = structlog.get_logger(__name__)


class Refusals:
    """Counts refusals by reason, and logs the first, tenth, hundredth and so on for each reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, reason: str, flag: str) -> None:
        """Count one refusal for *reason*; *flag* would allow the URL."""
        self._counts[reason] += 1
        count = self._counts[reason]
        if set(str(count)[1:]) <= {"0"} and str(count)[0] == "1":
            _logger.warning("image not fetched", reason=reason, flag=flag, count=count)
