"""The trace of one request: its ids, and the stages that are noted while it runs. They become spans when it ends."""

import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Self

Attributes = Mapping[str, str | int | float | Sequence[str]]
NANOSECONDS = 1e9
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


class Trace:
    """A request's part of the trace *trace_id*, below the client's span *parent_id*, which is 0 if there is none.

    *stages* has each stage's name, start and end, and *first_tokens* the time of each answer's first token, all in
    nanoseconds since the epoch. Nothing is noted unless the trace *is_sampled*.
    """

    def __init__(self, trace_id: int, parent_id: int, *, is_sampled: bool) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = random.getrandbits(64) or 1
        self.is_sampled = is_sampled
        self.begun_at = time.time_ns()
        self._since_1970 = self.begun_at - time.perf_counter_ns()
        self.stages: list[tuple[str, int, int]] = []
        self.first_tokens: list[int] = []

    @classmethod
    def of_headers(cls, headers: Iterable[tuple[bytes, bytes]], sample: float) -> Self:
        """Return a trace that continues the client's `traceparent`, if there is one, and follows its sampled flag.

        Without one, the trace is sampled with probability *sample*.
        """
        header = next((value for name, value in headers if name == b"traceparent"), b"")
        if (parent := _TRACEPARENT.fullmatch(header)) is not None:
            trace_id, span_id, flags = (int(part, 16) for part in parent.groups())
            return cls(trace_id, span_id, is_sampled=bool(flags & 1))
        return cls(random.getrandbits(128) or 1, 0, is_sampled=random.random() < sample)

    @property
    def traceparent(self) -> str:
        """The `traceparent` header for a worker. It makes this request the parent of the worker's spans."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    def now(self) -> int:
        """Return the time in nanoseconds since 1970, ignoring changes to the clock since the request began."""
        return self._since_1970 + time.perf_counter_ns()

    def add_stages(self, seconds: dict[str, float]) -> None:
        """Note how many *seconds* each stage took. The stages are in order, and the last one ends now."""
        if not self.is_sampled:
            return
        end = self.now()
        for stage, spent in reversed(seconds.items()):
            start = max(self.begun_at, end - _nanoseconds(spent))
            self.stages.append((stage, start, end))
            end = start

    def add_engine(self, seconds: Mapping[str, float]) -> None:
        """Note how many *seconds* a sample, which ends now, spent in each stage of the engine."""
        self.add_stages({f"engine.{stage}": seconds[stage] for stage in ("queue", "prefill", "decode")})
        if self.is_sampled and seconds["encode"]:
            # The sample waits for its images at the beginning of the prefill, which was added before the queue.
            _, start, end = self.stages[-2]
            self.stages.append(("engine.encode", start, min(end, start + _nanoseconds(seconds["encode"]))))

    def note_first_token(self) -> None:
        """Note that an answer's first token has arrived."""
        if self.is_sampled:
            self.first_tokens.append(self.now())


def _nanoseconds(seconds: float) -> int:
    """Return *seconds*, which a worker may have sent, in nanoseconds, or 0 for an impossible value, such as NaN."""
    return round(seconds * NANOSECONDS) if 0 <= seconds < NANOSECONDS else 0


TRACE: ContextVar[Trace | None] = ContextVar("saccade.trace", default=None)
"""The trace of the request that this task serves; None if it has none."""
