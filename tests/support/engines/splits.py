"""A prefill engine and a decode engine in this process, and requests that both serve."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
from engines import Answer, Outcome

from saccade.engine.core.kv_receiver import KvReceiver
from saccade.engine.core.kv_sender import KvSender
from saccade.engine.loop import Engine
from saccade.fleet.legs import legs_of
from saccade.protocol.request import EngineRequest
from saccade.transport.kv_transfer.service import KvTransfers

LIMIT_SECONDS = 60.0


def transfers_of(engine: Engine) -> KvTransfers:
    """The transfers of an engine that has a role."""
    assert isinstance(engine.kv_connector, KvSender | KvReceiver)
    return engine.kv_connector.transfers


def is_idle(engine: Engine) -> bool:
    """Nothing of any request or transfer is left, in the core and in the thread of the transfers."""
    return engines.is_idle(engine) and not engine.has_work and transfers_of(engine).num_open == 0


@dataclass
class Pair:
    """Both engines. Frames of connection 0 are collected in *first* and *second*."""

    prefill: Engine
    decode: Engine
    first: Outcome
    second: Outcome

    def submit(self, request: EngineRequest) -> None:
        """Send both legs, as a gateway does."""
        legs = legs_of(request, self.prefill.description.kv_transfer_address or "")
        for engine, leg in zip((self.prefill, self.decode), legs, strict=True):
            engine.requests.submit(0, leg)

    def step(self) -> None:
        """Run a step of each engine that has work."""
        for engine, outcome in ((self.prefill, self.first), (self.decode, self.second)):
            if engine.has_work and (frame := engine.step().get(0)) is not None:
                engines.collect(outcome, frame)

    def run(self, is_done: Callable[[], bool], what: str = "") -> None:
        """Run steps until *is_done*; fail after a minute."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_done():
            assert time.monotonic() < deadline, f"still not: {what}"
            self.step()
            if not (self.prefill.has_work or self.decode.has_work):
                time.sleep(0.001)

    def run_until_idle(self) -> None:
        """Run until nothing of any request is left at either engine."""
        self.run(lambda: is_idle(self.prefill) and is_idle(self.decode), "idle")

    def answers(self, *requests: EngineRequest) -> dict[str, Answer]:
        """Serve *requests* with both engines, and return what the decode engine told."""
        for request in requests:
            self.submit(request)
        self.run_until_idle()
        return self.second.answers


@contextmanager
def pair_of(folder: Path, *, first: dict[str, Any] | None = None, **settings: Any) -> Iterator[Pair]:
    """Two engines of one checkpoint; *first* are settings of the prefill engine alone."""
    prefill = engines.engine(folder, role="prefill", kv_transfer_bind="127.0.0.1:0", **{**settings, **(first or {})})
    try:
        decode = engines.engine(folder, role="decode", **settings)
        try:
            yield Pair(prefill, decode, Outcome(), Outcome())
        finally:
            decode.close()
    finally:
        prefill.close()


def names(request: EngineRequest) -> Sequence[str]:
    """The names of the samples' answers, as in Outcome."""
    return [request.request_id, *(f"{request.request_id}#{index}" for index in range(1, request.num_samples))]
