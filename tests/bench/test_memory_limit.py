"""What memory allows: whose bytes count, by what a server says of itself; never how fast this machine is."""

import pytest
from tables import table

from saccade.bench import memory_limit
from saccade.bench.memory_limit import bandwidth, local_step_bytes


def sample(worker: str, number: str = "1e+09") -> str:
    return f'saccade_step_weight_bytes{{model_name="m",worker="{worker}"}} {number}\n'


@table(
    ("root", "metrics", "expected"),
    [
        ("http://127.0.0.1:8000", sample("unix:/run/engine.sock"), 10**9),
        ("http://localhost:8000", sample("grpc://127.0.0.1:1") + sample("grpc://[::1]:2"), 10**9),
        ("http://127.0.0.1:8000", sample("grpc://127.0.0.1:1") + sample("grpc://127.0.0.1:2", "5"), 0),
        ("http://127.0.0.1:8000", sample("grpc://10.0.0.7:1"), 0),
        ("http://10.0.0.7:8000", sample("unix:/run/engine.sock"), 0),
        ("http://server:8000", sample("unix:/run/engine.sock"), 0),
        ("http://127.0.0.1:8000", "", 0),
    ],
)
def test_only_workers_on_this_machine_tell(root: str, metrics: str, expected: int) -> None:
    assert local_step_bytes(root, metrics) == expected


def test_bandwidth_counts_every_byte_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "TOTAL_BYTES", 1 << 20)
    times = iter(range(100))
    monkeypatch.setattr(memory_limit.time, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(memory_limit.os, "cpu_count", lambda: 4)
    assert bandwidth() == 1 << 20
