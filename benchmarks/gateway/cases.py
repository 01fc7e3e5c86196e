"""The rows: what is asked, by how many clients, and what Saccade's gateway is to reach beside SMG's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.gateway.systems import NATIVE, TOKENSPEED

SMALL, LARGE = (1280, 960), (1920, 1080)
NUM_IMAGES = 32


@dataclass(frozen=True)
class Goal:
    """Ours over SMG's in *metric*: `at_least`, or at most."""

    metric: str
    ratio: float
    at_least: bool = True

    def met(self, ratio: float) -> bool:
        """Whether a measured *ratio* reaches it."""
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio


def speed(ratio: float) -> Goal:
    """Requests per second, at least."""
    return Goal("requests_per_second", ratio)


def cpu(ratio: float) -> Goal:
    """CPU of the gateway's processes per request, at most."""
    return Goal("gateway_cpu_ms", ratio, at_least=False)


@dataclass(frozen=True)
class Case:
    """One row. *size* None asks without images; *caches* turns on both sides' caches of prepared images.

    A *memory* row is run for its peaks: the sampling disturbs it. *beside* adds text requests of one more client.
    Answers are streamed with *stream_tokens* tokens; *max_us_per_token* is the most CPU of the gateway for each, by
    system.
    """

    name: str
    family: str
    size: tuple[int, int] | None
    num_clients: int
    num_requests: int
    caches: bool = False
    memory: bool = False
    beside: bool = False
    goals: Mapping[str, tuple[Goal, ...]] = field(default_factory=dict)
    stream_tokens: int = 0
    max_us_per_token: Mapping[str, float] = field(default_factory=dict)


QWEN, KIMI = "qwen3_vl", "kimi_k25"

CASES = (
    Case(
        "Qwen3-VL 1280x960",
        QWEN,
        SMALL,
        num_clients=8,
        num_requests=400,
        goals={TOKENSPEED: (cpu(0.6), speed(1.3)), NATIVE: (cpu(0.4), speed(2.0))},
    ),
    Case(
        "Qwen3-VL 1280x960, latency",
        QWEN,
        SMALL,
        num_clients=1,
        num_requests=200,
        goals={NATIVE: (Goal("receipt_p50_ms", 0.5, at_least=False),)},
    ),
    Case("Qwen3-VL 1280x960, many", QWEN, SMALL, num_clients=32, num_requests=400),
    Case("Qwen3-VL 1280x960, memory", QWEN, SMALL, num_clients=32, num_requests=300, memory=True),
    Case(
        "Qwen3-VL 1920x1080",
        QWEN,
        LARGE,
        num_clients=8,
        num_requests=250,
        goals={NATIVE: (cpu(0.35), speed(2.0))},
    ),
    Case(
        "text only",
        QWEN,
        None,
        num_clients=32,
        num_requests=8000,
        goals={TOKENSPEED: (speed(0.3),), NATIVE: (speed(0.3),)},
    ),
    Case("text only, latency", QWEN, None, num_clients=1, num_requests=2000),
    Case(
        "streamed answers of 256 tokens",
        QWEN,
        None,
        num_clients=32,
        num_requests=160,
        stream_tokens=256,
        max_us_per_token={NATIVE: 25, TOKENSPEED: 60},
    ),
    Case("200 image requests in flight", QWEN, SMALL, num_clients=200, num_requests=0, beside=True),
    Case(
        "Kimi-K2.5 1280x960",
        KIMI,
        SMALL,
        num_clients=8,
        num_requests=400,
        goals={NATIVE: (cpu(0.35), speed(2.0))},
    ),
    Case(
        "Qwen3-VL 1280x960, repeated",
        QWEN,
        SMALL,
        num_clients=8,
        num_requests=800,
        caches=True,
        goals={NATIVE: (speed(4.0),)},
    ),
)
