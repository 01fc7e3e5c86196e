"""Logging and metrics.

A metric that means the same as one of vLLM's has vLLM's name, so that vLLM's dashboards work; all others begin with
`saccade_`. Neither labels nor log lines contain data that a client sent.
"""

import asyncio
import atexit
import logging
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import TextIO

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram

from saccade.log_writer import LineWriter, LogOutput
from saccade.metric_registry import MetricRegistry
from saccade.tracebacks import traceback_of
from saccade.tracing.trace import TRACE

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
_ARGUMENT = re.compile(r"%[-.0-9]*[a-z]")

STAGES = ("fetch", "hash", "tokenize", "route", "queue", "decode", "preprocess", "write", "media", "prepare")
"""The stages of a request in the gateway. *media* covers all work on pixels, *prepare* everything before the
dispatch."""

ENGINE_STAGES = ("queue", "encode", "prefill", "decode")
"""The stages of a sample in the engine; *encode* is a part of *prefill*."""

PAUSES = ("read", "choices", "delta")
"""Work on the event loop whose longest piece is shown: a body is read, the choices of an answer are made, a delta of an
answer is written."""

LAG_INTERVAL_SECONDS = 0.05
MODEL = ("model_name",)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = tuple(2.0**power for power in range(18))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_SHORT_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS[:10])


class AnswerMetrics:
    """Metrics of an answer, observed at its end for each of its samples."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(Histogram, labelnames=MODEL, registry=registry)
        tokens, seconds = partial(histogram, buckets=_TOKENS), partial(histogram, buckets=_SECONDS)
        self.success_total = Counter(
            "vllm:request_success", "Finished samples by finish reason.", (*MODEL, "finished_reason"), registry=registry
        )
        self.prompt_tokens = tokens("vllm:request_prompt_tokens", "Number of tokens of a prompt.")
        self.generation_tokens = tokens("vllm:request_generation_tokens", "Number of tokens of a sample.")
        self.most_tokens = tokens(
            "vllm:request_max_num_generation_tokens", "Number of tokens of the longest sample of a request."
        )
        self.tpot_seconds = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens of a sample.",
            buckets=_SHORT_SECONDS,
        )
        self.asked_tokens = tokens("vllm:request_params_max_tokens", "Limit of generated tokens that a request sets.")
        self.asked_samples = histogram(
            "vllm:request_params_n", "Number of samples that a request asks for.", buckets=_SAMPLES
        )
        stages = seconds(
            "saccade_engine_stage_seconds", "Time of one stage of a sample in the engine.", labelnames=("stage",)
        )
        self._engine_stages = {stage: stages.labels(stage) for stage in ENGINE_STAGES}
        self._engine_seconds = {
            stage: seconds(f"vllm:request_{stage}_time_seconds", f"Time of a sample in the engine's stage {stage}.")
            for stage in ("queue", "prefill", "decode", "inference")
        }

    def observe_engine(self, model: str, seconds: Mapping[str, float]) -> None:
        """Record how many *seconds* a sample spent in each of ENGINE_STAGES, and in prefill and decode together.

        Numbers that no clock can measure are left out: NaN or infinity would stay in a sum for ever.
        """
        for stage, spent in {**seconds, "inference": seconds["prefill"] + seconds["decode"]}.items():
            if not 0 <= spent < math.inf:
                continue
            if stage in self._engine_stages:
                self._engine_stages[stage].observe(spent)
            if stage in self._engine_seconds:
                self._engine_seconds[stage].labels(model).observe(spent)


class Metrics:
    """Metrics of one gateway process. Those of its engines are collected when `/metrics` is rendered."""

    def __init__(self) -> None:
        self.registry = registry = self.new_registry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=_SECONDS)
        short_seconds = partial(Histogram, registry=registry, buckets=_SHORT_SECONDS)
        self._failed_collectors = counter(
            "saccade_metric_collector_failures",
            "Times that the metrics of a collector were left out, because reading them failed.",
            ("collector",),
        )
        stages = short_seconds("saccade_stage_seconds", "Time of one stage of a request in the gateway.", ("stage",))
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self.ttft_seconds = seconds(
            "vllm:time_to_first_token_seconds", "Time from the arrival of a request to its first token.", MODEL
        )
        self.itl_seconds = short_seconds(
            "vllm:inter_token_latency_seconds", "Time between two deltas of an answer.", MODEL
        )
        self.e2e_seconds = seconds(
            "vllm:e2e_request_latency_seconds", "Time from the arrival of a request to its last token.", MODEL
        )
        self.answers = AnswerMetrics(self.registry)
        self.images_by_hash = counter(
            "saccade_images_by_hash", "Images sent as their hash alone, because the worker was believed to hold them."
        )
        self.pixels_wanted = counter("saccade_pixels_wanted", "Images sent as their hash that the worker lacked.")
        self.requests_total = counter(
            "saccade_http_requests", "Answered requests by route and status.", ("route", "status")
        )
        self.slots_in_use = gauge("saccade_slots_in_use", "Shared-memory slots held by requests.")
        self.file_store_bytes = gauge("saccade_file_store_bytes", "Bytes of uploaded files that are kept.")
        self.requests_in_flight = gauge("saccade_requests_in_flight", "Requests being served.")
        self._lag = short_seconds("saccade_event_loop_lag_seconds", "Delay of a timer of the event loop.")

        pauses = gauge(
            "saccade_event_loop_longest_pause_seconds",
            "Longest time since the start that one piece of work held the event loop.",
            ("stage",),
        )
        self.longest_pauses = dict.fromkeys(PAUSES, 0.0)
        for stage in PAUSES:
            pauses.labels(stage).set_function(partial(self.longest_pauses.__getitem__, stage))

    def new_registry(self) -> MetricRegistry:
        """Return a registry whose failures these metrics count."""
        return MetricRegistry(lambda collector: self._failed_collectors.labels(collector).inc())

    def observe_stages(self, seconds: dict[str, float]) -> None:
        """Record how many *seconds* each of some STAGES took; they followed one another, and the last ends now."""
        for stage, spent in seconds.items():
            self._stages[stage].observe(spent)
        if (trace := TRACE.get()) is not None:
            trace.add(seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record how long the block takes as stage *name*."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe_stages({name: time.perf_counter() - start})

    def note_pause(self, stage: str, start: float) -> None:
        """Note that work of *stage*, one of PAUSES, has held the event loop since *start* (time.perf_counter)."""
        spent = time.perf_counter() - start
        if spent > self.longest_pauses[stage]:
            self.longest_pauses[stage] = spent

    async def watch_event_loop(self) -> None:
        """Record the event loop's lag at intervals, until cancelled."""
        while True:
            start = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self._lag.observe(max(0.0, time.perf_counter() - start - LAG_INTERVAL_SECONDS))


def configure_logging(level: int = logging.INFO, *, serves_clients: bool = False) -> LogOutput:
    """Send all log lines to stderr: as text on a terminal, else as JSON. Call once, when a process starts.

    A thread writes the lines; lines that still wait when the process ends are written then.
    In a process that *serves_clients* tracebacks leave out what the errors say, which may be a client's text.
    """
    is_terminal = sys.stderr.isatty()
    writer = LineWriter(sys.stderr.fileno(), _text_of_dropped if is_terminal else _json_of_dropped)
    atexit.register(writer.flush)
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        # First, so that a line below the level costs nothing.
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    plain, format_exc_info = structlog.dev.plain_traceback, structlog.processors.format_exc_info
    last: list[structlog.types.Processor] = (
        [_printable, structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback if serves_clients else plain)]
        if is_terminal
        else [
            structlog.processors.ExceptionRenderer(_traceback) if serves_clients else format_exc_info,
            _event_first,
            structlog.processors.JSONRenderer(separators=(",", ":")),
        ]
    )
    handler = logging.StreamHandler(_Lines(writer))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared if is_terminal else [*shared, _with_worker],
            pass_foreign_args=not is_terminal,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    # Its warnings are about wrong requests: any client could fill the log.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    output = LogOutput(writer, level, is_terminal)
    handler.addFilter(_Counting(output))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    return output


def log_warnings() -> None:
    """Send warnings and errors to stderr, for a program that has not configured structlog: by default it prints all."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )


def _traceback(exc_info: structlog.typing.ExcInfo) -> str:
    return traceback_of(exc_info[1])


def _write_traceback(stream: TextIO, info: structlog.typing.ExcInfo) -> None:
    stream.write(f"\n{traceback_of(info[1])}")


def log_uncaught() -> None:
    """Log an exception that ends this process. Python would write it to stderr, and wait if nobody reads."""
    logger = structlog.get_logger(__name__)

    def log(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.error("the process has failed", exc_info=(kind, error, trace))

    sys.excepthook = log


class _Counting(logging.Filter):
    """Counts log lines."""

    def __init__(self, output: LogOutput) -> None:
        super().__init__()
        self._output = output

    def filter(self, record: logging.LogRecord) -> bool:
        self._output.num_lines[record.levelname.lower()] += 1
        return True


def _with_worker(_: object, __: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """Add the field `worker`, the argument of "worker %s" in the text of a line of logging."""
    arguments = line.pop("positional_args", ())
    before, is_about_worker, _rest = str(line["_record"].msg).partition("worker %s")
    position = len(_ARGUMENT.findall(before))
    if is_about_worker and isinstance(arguments, tuple) and position < len(arguments):
        line["worker"] = str(arguments[position])
    return line


def _event_first(_: object, __: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """Return *line* with its fields in the order of lines of requests."""
    return {name: line.pop(name) for name in ("event", "timestamp", "level") if name in line} | dict(line)


def _printable(_: object, __: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
    """Replace the characters of a line that a terminal would interpret: the line may quote a worker."""
    for name, value in line.items():
        if isinstance(value, str):
            line[name] = "".join(one if one.isprintable() or one in "\n\t" else " " for one in value)
    return line


class _Lines:
    """The stream of a logging handler: every write is one or more whole lines."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def write(self, lines: str) -> None:
        self._writer.write(lines.encode(errors="backslashreplace"))


class _Dropped(msgspec.Struct, frozen=True, tag_field="event", tag="log lines dropped"):
    """The line with the number of dropped lines."""

    timestamp: datetime
    dropped: int
    level: str = "warning"


def _json_of_dropped(number: int) -> bytes:
    return msgspec.json.encode(_Dropped(datetime.now(UTC), number)) + b"\n"


def _text_of_dropped(number: int) -> bytes:
    return f"saccade: {number} log lines were dropped here because stderr was not read fast enough\n".encode()
