"""The rows: what is asked, and by how many clients."""

from dataclasses import dataclass

SMALL, LARGE = (1280, 960), (1920, 1080)
NUM_IMAGES = 32


@dataclass(frozen=True)
class Case:
    """One row. *size* None asks without images; *caches* turns on both sides' caches of prepared images.

    A *memory* row is run for its peaks: the sampling disturbs it. *beside* adds text requests of one more client.
    Answers are streamed with *stream_tokens* tokens.
    """

    name: str
    family: str
    size: tuple[int, int] | None
    num_clients: int
    num_requests: int
    caches: bool = False
    memory: bool = False
    beside: bool = False
    stream_tokens: int = 0


QWEN, KIMI = "qwen3_vl", "kimi_k25"

CASES = (
    Case("Qwen3-VL 1280x960", QWEN, SMALL, num_clients=8, num_requests=400),
    Case("Qwen3-VL 1280x960, latency", QWEN, SMALL, num_clients=1, num_requests=200),
    Case("Qwen3-VL 1280x960, many", QWEN, SMALL, num_clients=32, num_requests=400),
    Case("Qwen3-VL 1280x960, memory", QWEN, SMALL, num_clients=32, num_requests=300, memory=True),
    Case("Qwen3-VL 1920x1080", QWEN, LARGE, num_clients=8, num_requests=250),
    Case("text only", QWEN, None, num_clients=32, num_requests=8000),
    Case("text only, latency", QWEN, None, num_clients=1, num_requests=2000),
    Case("streamed answers of 256 tokens", QWEN, None, num_clients=32, num_requests=160, stream_tokens=256),
    Case("200 image requests in flight", QWEN, SMALL, num_clients=200, num_requests=0, beside=True),
    Case("Kimi-K2.5 1280x960", KIMI, SMALL, num_clients=8, num_requests=400),
    Case("Qwen3-VL 1280x960, repeated", QWEN, SMALL, num_clients=8, num_requests=800, caches=True),
)
