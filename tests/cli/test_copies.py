"""What `saccade serve --data-parallel-size` gives to each copy of a model."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from server import Server, free_port, program
from tables import table
from waiting import wait_until

from saccade.cli.copies import gpus_of_copies, threads_of_copy, workers_of_copies
from saccade.engine.config import EngineSettings
from saccade.engine.gpu_devices import num_gpus
from saccade.errors import StartupError


@table(
    ("num_copies", "tensor_parallel_size", "visible", "given"),
    [
        (1, 1, None, [None]),
        (2, 1, None, ["0", "1"]),
        (2, 2, None, ["0,1", "2,3"]),
        (3, 1, "7,5,GPU-1", ["7", "5", "GPU-1"]),
    ],
)
def test_each_copy_has_its_own_gpus(
    num_copies: int,
    tensor_parallel_size: int,
    visible: str | None,
    given: list[str | None],
) -> None:
    engine = EngineSettings(tensor_parallel_size=tensor_parallel_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        variables = gpus_of_copies(engine, num_copies, 4)
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in variables] == given


@table(
    ("engine", "num_gpus"),
    [(EngineSettings(device="cpu"), 1), (EngineSettings(), 0)],
)
def test_copies_on_a_cpu_get_no_gpus(engine: EngineSettings, num_gpus: int) -> None:
    assert gpus_of_copies(engine, 3, num_gpus) == [{}, {}, {}]


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(StartupError, match=r"--data-parallel-size 3 with .* 2 takes 6 GPUs; there are 4\."):
        gpus_of_copies(EngineSettings(tensor_parallel_size=2), 3, 4)


def test_gpus_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus(tmp_path) == 2


def test_copies_share_out_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of_copy(EngineSettings(), number) for number in (1, 2, 4, 20)] == [None, 4, 2, 1]
    assert threads_of_copy(EngineSettings(threads=3), 2) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of_copy(EngineSettings(), 2) is None


def test_copies_are_named_and_end_together(tmp_path: Path) -> None:
    workers = workers_of_copies("m", [tmp_path / "a", tmp_path / "b"], EngineSettings(device="cpu"), "INFO", 0.0)
    assert [worker.name for worker in workers] == ["worker 1 of 2", "worker 2 of 2"]
    assert [worker.ends_with_previous for worker in workers] == [False, True]
    assert [str(tmp_path / name) in worker.command for name, worker in zip("ab", workers, strict=True)] == [True, True]


@pytest.mark.ci
def test_a_copy_that_dies_is_started_again_alone(tiny_qwen3_vl: Path) -> None:
    """The other one answers meanwhile; all end together."""
    port = free_port()
    flags = ("--port", str(port), "--max-model-len", "512", "--served-model-name", "tiny", "--decode-processes", "1")
    with program("serve", str(tiny_qwen3_vl), "-dp", "2", *flags) as process:
        server = Server(port, process)
        server.wait_until_ready(240)
        wait_until(lambda: server.metric("saccade_worker_ready") == 2)

        def workers() -> dict[int, str]:
            found = {}
            for child in psutil.Process(process.pid).children():
                try:
                    words = child.cmdline()
                except (psutil.ZombieProcess, psutil.NoSuchProcess):  # it ends at this moment
                    continue
                if "worker" in words:
                    found[child.pid] = words[words.index("--uds") + 1]
            return found

        def answer() -> str:
            with server.client(timeout=60) as client:
                asked = {"role": "user", "content": "Hello!"}
                told = client.chat.completions.create(
                    model="tiny", messages=[asked], max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
                )
            return json.dumps(told.choices[0].message.content)

        right = answer()
        before = workers()
        dead, kept = sorted(before)
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: dead not in workers())
        assert answer() == right
        wait_until(lambda: server.metric("saccade_worker_ready") == 2 and len(workers()) == 2)
        assert kept in workers()
        assert sorted(workers().values()) == sorted(before.values())
        assert answer() == right
        children = psutil.Process(process.pid).children(recursive=True)
    assert not any(child.is_running() for child in children)
