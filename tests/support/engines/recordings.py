"""Recordings for tests: engines that make them, executors that replay them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import msgspec
import torch

from saccade.engine.loop import Engine
from saccade.engine.recording import SUFFIX, Header, Record, Recorder, Recording, Replay, ReplayResult
from saccade.engine.startup import fresh_engine
from saccade.transport.framing import framed


@contextmanager
def recording_engine(model: Path, folder: Path, **settings: Any) -> Iterator[Engine]:
    """An engine on two threads that records, pixels too unless told otherwise; at the end all is written."""
    before = torch.get_num_threads()
    wanted = {"threads": 2, "record_steps": str(folder), "record_pixels": True, **settings}
    subject = engines.engine(model, **wanted)
    try:
        yield subject
    finally:
        subject.close()
        torch.set_num_threads(before)


def recorder(engine: Engine) -> Recorder:
    """The engine's recorder."""
    assert engine.recorder is not None
    return engine.recorder


def segments(folder: Path) -> list[Path]:
    """The files of a recording, the oldest first."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def replayed(file: Path, **changes: str) -> ReplayResult:
    """What a fresh executor makes of *file*."""
    before = torch.get_num_threads()
    recording = Recording(file)
    recording.check_images()
    engine, machine = fresh_engine(recording.header, changes)
    outcome = Replay(engine.executor, is_exact=machine == recording.header.machine).run_records(recording.records())
    engine.close()
    torch.set_num_threads(before)
    return outcome


def rewrite(file: Path, change: Callable[[Record], Record] = lambda record: record, **header: Any) -> None:
    """Write *file* again with every record, and fields of its header, changed."""
    recording: Recording = Recording(file)
    head: Header = msgspec.structs.replace(recording.header, **header)
    values = [head, *(change(record) for record in recording.records())]
    file.write_bytes(b"".join(framed(msgspec.msgpack.encode(value)) for value in values))
