"""The rows: what is asked, by how many clients, and what Saccade is to reach beside vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

VLLM, SACCADE, TRANSFORMERS = "vLLM", "saccade", "transformers generate"
SYSTEMS = (VLLM, SACCADE, TRANSFORMERS)

TTFT, TTFT_P95, TPOT = "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms"
REQUESTS, TOKENS = "requests_per_second", "output_tokens_per_second"


@dataclass(frozen=True)
class Goal:
    """Ours over vLLM's in *metric*: `at_least`, or at most. An *aim* is hoped for, the rest is required."""

    metric: str
    ratio: float
    at_least: bool = False
    aim: bool = False

    def met(self, ratio: float) -> bool:
        """Whether a measured *ratio* reaches it."""
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio


def tokens(ratio: float, *, aim: bool = False) -> Goal:
    """Output tokens per second, at least."""
    return Goal(TOKENS, ratio, at_least=True, aim=aim)


def time(metric: str, ratio: float, *, aim: bool = False) -> Goal:
    """A time, at most."""
    return Goal(metric, ratio, aim=aim)


EQUAL = (time(TTFT, 1.0), time(TPOT, 1.0), tokens(1.0))
AIMED = (time(TTFT, 0.6, aim=True), tokens(1.3, aim=True))


@dataclass(frozen=True)
class Case:
    """One row. *size* (width, height) None asks without images; *same* sends one image every time.

    At least *num_warmup* requests, and one of each client, come before those that are measured.
    """

    name: str
    size: tuple[int, int] | None
    num_clients: int
    num_requests: int
    goals: Sequence[Goal]
    same: bool = False
    output_tokens: int = 64
    num_warmup: int = 4


SMALL, LARGE = (448, 448), (1280, 960)

SHAPE_2B = (
    Case("448x448", SMALL, 1, 4, EQUAL, output_tokens=24, num_warmup=1),
    Case("448x448", SMALL, 4, 8, EQUAL, output_tokens=24, num_warmup=1),
    Case("1280x960", LARGE, 1, 3, EQUAL, output_tokens=8, num_warmup=1),
    Case("text only", None, 1, 2, EQUAL, num_warmup=1),
    Case("text only", None, 4, 8, EQUAL, num_warmup=1),
)
TINY = (
    Case("448x448", SMALL, 1, 40, (time(TTFT, 0.6), time(TPOT, 1.0))),
    Case("448x448", SMALL, 8, 40, (time(TTFT, 0.6), tokens(1.3))),
    Case("1280x960", LARGE, 1, 24, (*EQUAL, *AIMED)),
    Case("1280x960", LARGE, 8, 24, (*EQUAL, *AIMED)),
    Case("448x448, the same every time", SMALL, 1, 40, EQUAL, same=True),
    Case("448x448, the same every time", SMALL, 8, 40, EQUAL, same=True),
    Case("1280x960, the same every time", LARGE, 1, 24, EQUAL, same=True),
    Case("1280x960, the same every time", LARGE, 8, 24, EQUAL, same=True),
    Case("text only", None, 1, 40, EQUAL),
    Case("text only", None, 8, 40, EQUAL),
)
SHAPES: Mapping[str, Sequence[Case]] = MappingProxyType({"2b": SHAPE_2B, "tiny": TINY})
"""The rows by the size of the model: a request of the first takes seconds, one of the second a fraction of one."""
