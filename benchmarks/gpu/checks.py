"""The checks: backends and graphs against plain PyTorch's attention, no wait in the encoder, one context a rank."""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.subject import Subject
from saccade.engine.config import EngineConfig
from saccade.engine.executor.encoder_graphs import refusal
from saccade.engine.executor.execution import decoder_workload, tower_workload
from saccade.engine.startup import start
from saccade.errors import StartupError
from saccade.nn.backends import BACKENDS, PLAIN, VISION_BACKENDS, load_backend, load_vision_backend

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference, as a part of the largest value of plain PyTorch."""

FAILURES = (RuntimeError, ValueError, StartupError)
ROWS = 5


class Check(NamedTuple):
    """What was checked, how it ended, and the difference or the reason."""

    name: str
    result: str
    detail: str


def decoder_backends(subject: Subject) -> Iterator[Check]:
    """Compare each backend of the text decoder that can compute the model, and its graphs, with plain PyTorch."""
    workload = decoder_workload(subject.config, subject.model)
    expected = subject.decoding(load_backend(PLAIN, workload), ROWS, with_graphs=False)()
    for name, entry in BACKENDS.items():
        if entry.device_type not in (None, subject.model.network.device.type):
            continue
        if name != PLAIN:
            yield _compared(f"decoder, {name}", partial(_decoded, subject, name), expected)
        yield _decode_graphs(subject, name, expected)


def _decode_graphs(subject: Subject, name: str, expected: torch.Tensor) -> Check:
    label, workload = f"decoder, {name}, CUDA graphs", decoder_workload(subject.config, subject.model)
    try:
        backend = load_backend(name, workload)
    except StartupError as error:
        return Check(label, NOT_RUN, error.message)
    if not backend.captures_decodes:
        return Check(label, NOT_RUN, f"{name} depends on lengths that the host knows")
    return _compared(label, lambda: subject.decoding(backend, ROWS, with_graphs=True)(), expected)


def _decoded(subject: Subject, name: str) -> torch.Tensor:
    backend = load_backend(name, decoder_workload(subject.config, subject.model))
    return subject.decoding(backend, ROWS, with_graphs=False)()


def _encoded(subject: Subject, name: str, count: int) -> torch.Tensor:
    return subject.prepared(load_vision_backend(name, tower_workload(subject.model)), count)()


def vision_backends(subject: Subject) -> Iterator[Check]:
    """Compare each backend of the vision encoder, and its graphs, with plain PyTorch; and look for waits."""
    workload, most = tower_workload(subject.model), len(subject.images)
    counts = sorted({1, min(2, most), most})
    plain = load_vision_backend(PLAIN, workload)
    for name, entry in VISION_BACKENDS.items():
        if entry.device_type not in (None, subject.model.network.device.type):
            continue
        for count in counts:
            expected = subject.prepared(plain, count)()
            if name != PLAIN:
                call = partial(_encoded, subject, name, count)
                yield _compared(f"vision encoder, {name}, {count} images", call, expected)
            yield _encoder_graphs(subject, name, count, expected)
        yield _waits(subject, name)


def _encoder_graphs(subject: Subject, name: str, count: int, expected: torch.Tensor) -> Check:
    label = f"vision encoder, {name}, {count} images, CUDA graphs"
    try:
        backend = load_vision_backend(name, tower_workload(subject.model))
    except StartupError as error:
        return Check(label, NOT_RUN, error.message)
    reason = refusal(subject.model.network, backend, cuts_encoder=False)
    if reason is not None:
        return Check(label, NOT_RUN, reason)

    def encode() -> torch.Tensor:
        outcome = subject.encoder(backend, with_graphs=True).encode_together(subject.job(count))
        if outcome.failed:
            raise RuntimeError("the encoder failed; its log says why")
        return torch.cat([outcome.features[image.output_id] for image in subject.images[:count]])

    return _compared(label, encode, expected)


def _waits(subject: Subject, name: str) -> Check:
    """Have torch raise where the host waits for the device within `encode`."""
    label = f"vision encoder, {name}: the host does not wait"
    if subject.model.network.device.type != "cuda":
        return Check(label, NOT_RUN, "this needs a GPU")
    try:
        call = subject.prepared(load_vision_backend(name, tower_workload(subject.model)), len(subject.images))
        call()  # what is compiled at the first call may wait
        torch.cuda.set_sync_debug_mode("error")
        call()
    except FAILURES as error:
        return Check(label, NOT_RUN if isinstance(error, StartupError) else FAILED, _line(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Check(label, PASSED, "")


def contexts(config: EngineConfig) -> Check:
    """Start two ranks, and see whether the second has a context on its own GPU alone."""
    label = "one CUDA context a rank"
    if torch.cuda.device_count() < 2:
        return Check(label, NOT_RUN, "this machine has one GPU")
    torch.zeros(1, device="cuda")
    before = _contexts()
    if not before:
        return Check(label, NOT_RUN, "nvidia-smi lists no processes here")
    try:
        engine = start(config, lambda *_: None)
    except FAILURES as error:
        return Check(label, FAILED, _line(error))
    try:
        added = _contexts() - before
    finally:
        engine.close()
    return Check(label, PASSED if sorted(added.values()) == [1] else FAILED, f"added by the second rank: {dict(added)}")


def _contexts() -> Counter[str]:
    """Return the number of processes on each GPU that has any."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return Counter(line.strip() for line in listed.stdout.splitlines() if line.strip())


def _compared(name: str, call: Callable[[], torch.Tensor], expected: torch.Tensor) -> Check:
    try:
        actual = call()
    except FAILURES as error:
        return Check(name, NOT_RUN if isinstance(error, StartupError) else FAILED, _line(error))
    largest = float(expected.float().abs().max())
    difference = float((actual.float() - expected.float()).abs().max()) / largest
    # A NaN is not at most anything.
    result = PASSED if difference <= TOLERANCES[expected.dtype] else FAILED
    return Check(name, result, f"differs by {difference:.1e} of the largest value")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def has_failed(checks: Iterable[Check]) -> bool:
    """Return whether any check failed."""
    return any(check.result == FAILED for check in checks)
