"""Logs which setting refuses pictures by URL: nothing of what clients sent, and no line for each refusal."""

from collections import Counter

import structlog

_logger = structlog.get_logger(__name__)


class Refusals:
    """Counts refusals by reason; logs the first of each, and then the tenth, the hundredth and so on."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, reason: str, flag: str) -> None:
        """Count one refusal for *reason*, which *flag* would lift."""
        self._counts[reason] += 1
        count = self._counts[reason]
        if set(str(count)[1:]) <= {"0"} and str(count)[0] == "1":
            _logger.warning("picture not fetched", reason=reason, flag=flag, count=count)
