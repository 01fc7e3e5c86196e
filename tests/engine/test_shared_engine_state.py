"""Whatever ends a request, at whatever step: other tenants' answers stay, and nothing of it is left. # B2, B4, F25

A *victim* and a *bystander* of another tenant, with the same prompt and images, run in one engine. A fault happens to
the victim in step number k, for every k. docs/reliability.md lists what requests share in an engine.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import msgspec
import pytest
import torch
from engines import Outcome
from tables import table
from waiting import wait_until

from saccade.engine.core import requests
from saccade.engine.core.sequence import Sequence
from saccade.engine.loop import Engine
from saccade.errors import InvalidValue
from saccade.nn.context import RecurrentState
from saccade.protocol.kv_transfer import SendKv, new_key
from saccade.protocol.output import FinishReason, StepFrame
from saccade.protocol.request import EngineRequest, Grammar, MediaPixels, SupplyPixels
from saccade.transport.shared_memory import SlotPool, open_slot

pytestmark = pytest.mark.ci

WIDE = (1, 6, 16)
PHOTO = ((96, 64), 1)
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'
JSON = Grammar("json_schema", '{"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 4}')
VICTIM, BYSTANDER = 0, 1
"""Their connections: each has a gateway of its own."""

STEPS_TO_ANSWER = 2
"""Steps between a request for pixels and its answer."""


@dataclass(frozen=True)
class Kind:
    """A kind of victim: its prompt, and what else it asks for. The bystander draws one sample."""

    parts: list[Any]
    network: str = "qwen3_vl"
    sampling: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 1
    pixels: str = "inline"
    is_sent: bool = False


IMAGE: list[Any] = [5, (WIDE, 1), 20]
AHEAD = {"async_scheduling": True}
CHUNKS = {"max_num_batched_tokens": 24}
HYBRID = {"state_snapshot_blocks": 1, **CHUNKS}
KINDS = {
    "a text": Kind([40]),
    "an image, a step ahead": Kind(IMAGE, settings=AHEAD),
    "an image in shared memory": Kind(IMAGE, pixels="slot", settings=CHUNKS),
    "an image by its hash": Kind(IMAGE, pixels="hash"),
    "three samples": Kind(IMAGE, num_samples=3, settings=AHEAD),
    "a grammar": Kind([20], sampling={"grammar": JSON, "max_tokens": 6}),
    "scores of the prompt, in chunks": Kind([60], sampling={"num_prompt_logprobs": 2}, settings=CHUNKS),
    "recurrent layers": Kind([40, PHOTO, 9], "qwen3_5", settings={**HYBRID, **AHEAD}),
    "drafts": Kind([40], "qwen3_5", settings={**HYBRID, "speculative_config": MTP}, num_samples=2),
    "layers with a window": Kind([40, PHOTO, 9], "gemma4_e2b", settings={**CHUNKS, **AHEAD}),
    "a prompt for a decode worker": Kind(IMAGE, is_sent=True, settings={**CHUNKS, "role": "prefill"}),
    "samples for a decode worker": Kind(IMAGE, is_sent=True, num_samples=3, settings={"role": "prefill"}),
}


class Subject:
    """An engine that serves one kind of victim, and the bystander's answer by an engine that serves nothing else."""

    def __init__(self, kind: Kind, folder: Path, pool: SlotPool) -> None:
        self.kind, self._folder, self._pool = kind, folder, pool
        self.settings = kind.settings
        if kind.is_sent:
            self.settings = {**self.settings, "kv_transfer_bind": "127.0.0.1:0"}
        fresh = engines.engine(folder, **self.settings)
        asked = self.asked("right")
        self.right = engines.drain(fresh, asked).answers["right"].token_ids
        fresh.close()
        assert len(self.right) == 4 or kind.sampling
        self.engine = engines.engine(folder, **self.settings)
        wait_until(lambda: not counts(self.engine)["transfers"])

    def asked(self, name: str) -> EngineRequest:
        """A request of the tenant *name*."""
        sampling = {"max_tokens": 4, **self.kind.sampling}
        asked = engines.request(self._folder, self.kind.parts, name, **sampling)
        return msgspec.structs.replace(asked, salt=name.encode())

    def victim(self) -> EngineRequest:
        asked = self.asked("victim")
        replace = msgspec.structs.replace
        if self.kind.is_sent:
            asked = replace(asked, kv_transfer=SendKv(new_key()), sampling=replace(asked.sampling, max_tokens=1))
        media = tuple(replace(item, inline=None, slot=self._slot_of(item.inline)) for item in asked.media)
        if self.kind.pixels != "inline":
            asked = replace(asked, media=media)
        return replace(asked, num_samples=self.kind.num_samples)

    def _slot_of(self, content: bytes | None) -> Any:
        if self.kind.pixels != "slot" or content is None:
            return None
        slot = self._pool.acquire(len(content))
        assert slot is not None
        with open_slot(slot.ref) as view:
            view[:] = content
        return slot.ref

    def pixels(self) -> SupplyPixels:
        inline = [item.inline for item in self.asked("victim").media]
        return SupplyPixels(
            request_id="victim", media=tuple(MediaPixels(index, inline=one) for index, one in enumerate(inline))
        )


def counts(engine: Engine) -> dict[str, int]:
    """How many things of each kind are open. Blocks and features that are only cached are not."""
    scheduler = engine.scheduler
    manager, encoder = scheduler.block_manager, scheduler.encoder_scheduler
    groups = [group for group in (manager.paged_blocks, manager.window_blocks) if group is not None]
    grammars, transfers = engine.requests.grammars, engine.kv_connector.transfers
    return {
        "requests": sum(map(len, scheduler.requests.values())),
        "waiting": len(scheduler.waiting) + len(scheduler.parked),
        "admitted": scheduler.num_admitted,
        "rows": scheduler.budgets.max_num_seqs - scheduler.rows.num_free,
        "frames": len(scheduler.frames),
        "references of blocks": sum(sum(group.references) for group in groups),
        "blocks": sum(group.num_blocks - group.num_free_blocks for group in groups),
        "checkpoints": 0 if manager.checkpoints is None else manager.checkpoints.num_held,
        "pins": len(encoder.encoder_cache.pins),
        "images in steps": len(encoder.launched),
        "features without an entry": len(engines.local(engine).runner.encoder_outputs) - len(encoder.encoder_cache),
        "grammars": 0 if grammars is None else len(grammars.pending),
        "requests for pixels": len(scheduler.pixel_deadlines),
        "transfers": 0 if transfers is None else transfers.num_open,
        "work": int(engine.has_work),
    }


Fault = Callable[[Engine, pytest.MonkeyPatch], None]


def victims(engine: Engine) -> list[Sequence]:
    return engine.scheduler.samples(VICTIM, "victim")


def aborted(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.requests.abort(VICTIM, "victim")


def first_sample_aborted(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.requests.abort(VICTIM, "victim", 0)


def hung_up(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.requests.hangup(VICTIM)


def late(_: Engine, patch: pytest.MonkeyPatch) -> None:
    """The answer to a request for pixels does not come in time."""
    now = time.monotonic() + requests.ANSWER_SECONDS + 1
    patch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))


def not_numbers(engine: Engine, _: pytest.MonkeyPatch) -> None:
    """Something wrote NaN into all state of the victim that it does not share with others."""
    caches, manager = engines.local(engine).runner.caches, engine.scheduler.block_manager
    for sequence in victims(engine):
        window = sequence.tables[1]
        blocks = {True: window.blocks[window.num_passed :], False: sequence.block_table}
        for layer, in_window in zip(caches.layers, caches.windows, strict=True):
            if isinstance(layer, RecurrentState):
                rows = [] if sequence.row is None else [sequence.row]
            else:
                rows = list(blocks[in_window is not None and manager.window_blocks is not None])
            for tensor in layer.live if isinstance(layer, RecurrentState) else layer:
                if isinstance(tensor, torch.Tensor):
                    tensor[rows] = float("nan")


def not_encoded(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The victim's image cannot be encoded: neither alone nor in one call with others."""
    network, cache = engines.module(engine), engine.scheduler.encoder_scheduler.encoder_cache
    images = [pair for one in victims(engine)[:1] for pair in zip(one.images, one.request.media, strict=True)]
    if not images or images[0][0].key in cache:
        return
    [(key, num_bytes)] = [(image.key, math.prod(item.pixel_shape)) for image, item in images]
    encode = network.encode
    failed: list[int] = []

    def failing(pixels: torch.Tensor, *others: Any) -> Any:
        if cache.has_begun(key) and (len(pixels) > num_bytes or not failed):
            failed.extend([1] * (len(pixels) <= num_bytes))
            raise RuntimeError("no memory")
        return encode(pixels, *others)

    patch.setattr(network, "encode", failing)


def no_mask(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The victim's grammar allows no token, or cannot say which."""

    def failing() -> bytes:
        raise InvalidValue("The answer's grammar became too large while it was matched; make it simpler.")

    for sequence in victims(engine):
        if sequence.matcher is not None:
            patch.setattr(sequence.matcher, "mask", failing)


def step_failed(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The whole step fails, the bystander's part too."""

    def failing(*_: Any) -> Any:
        raise RuntimeError("broken")

    patch.setattr(engines.local(engine).runner, "forward", failing)


FAULTS: dict[str, Fault] = {
    "an abort": aborted,
    "an abort of sample 0": first_sample_aborted,
    "the end of the gateway's stream": hung_up,
    "a deadline": late,
    "values that are not finite": not_numbers,
    "an image that is not encoded": not_encoded,
    "a grammar that fails": no_mask,
    "a step that fails": step_failed,
}


def run(subject: Subject, fault: Fault, at: int) -> tuple[Outcome, int]:
    """Serve victim and bystander, with the fault in step number *at*. Return the bystander's answer and the steps.

    A victim that waits for a decode worker when nothing else is to be done is aborted.
    """
    engine, told, victim = subject.engine, Outcome(), Outcome()
    asked = subject.victim()
    engine.requests.submit(VICTIM, asked)
    engine.requests.submit(BYSTANDER, subject.asked("bystander"))
    number, supply_at = 0, -1
    while engine.has_work or number <= supply_at:
        with pytest.MonkeyPatch.context() as patch:
            if number == at:
                fault(engine, patch)
            frames = engine.step()
        engines.collect(told, frames.get(BYSTANDER, StepFrame([])))
        engines.collect(victim, frame := frames.get(VICTIM, StepFrame([])))
        supply_at = number + STEPS_TO_ANSWER if frame.pixels_wanted else supply_at
        if number == supply_at:
            engine.requests.supply(VICTIM, subject.pixels())
        number += 1
        assert number < 1000
    if number <= at:
        with pytest.MonkeyPatch.context() as patch:
            fault(engine, patch)
            engines.collect(victim, engine.step().get(VICTIM, StepFrame([])))
    engine.requests.abort(VICTIM, "victim")
    engines.collect(victim, engine.step().get(VICTIM, StepFrame([])))
    if fault is not hung_up:
        answers = victim.answers.values()
        assert any(one.failure for one in answers) or all(one.finish_reason is not None for one in answers)
        assert len(victim.released) == sum(item.slot is not None for item in asked.media)
    wait_until(lambda: not any(counts(engine).values()))
    return told, number


def check(subject: Subject, fault: Fault, at: int) -> int:
    """Return how many steps victim and bystander took."""
    engine, where = subject.engine, f"in step {at}"
    engine.scheduler.reset_caches(prefix=True, media=True)
    told, num_steps = run(subject, fault, at)
    answer = told.answers["bystander"]
    if fault is not step_failed or answer.finish_reason is not FinishReason.ERROR:
        assert (answer.failure, answer.token_ids) == (None, subject.right), where
    tenants = ("later", "bystander", *(() if fault is not_numbers else ("victim",)))
    for name, later in engines.drain(engine, *map(subject.asked, tenants), connection=2).answers.items():
        assert (later.failure, later.token_ids) == (None, subject.right), f"{name} {where}"
    assert not any(counts(engine).values()), where
    return num_steps


@pytest.fixture(scope="module")
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(64 << 20)
    yield pool
    pool.close()


@pytest.fixture
def subject_of(network_folder: Callable[[str], Path], pool: SlotPool) -> Iterator[Callable[[str], Subject]]:
    made: list[Subject] = []

    def make(name: str) -> Subject:
        made.append(Subject(KINDS[name], network_folder(KINDS[name].network), pool))
        return made[-1]

    yield make
    for subject in made:
        subject.engine.close()


@table("kind", KINDS, ids=KINDS)
def test_each_step_meets_a_fault(kind: str, subject_of: Callable[[str], Subject]) -> None:
    """Each step one of the faults, in turn; another kind's first step meets another fault."""
    subject, faults, first = subject_of(kind), list(FAULTS.values()), list(KINDS).index(kind)
    at = 0
    while check(subject, faults[(first + 3 * at) % len(faults)], at) >= at:
        at += 1
    assert at > 3


@pytest.mark.conformance
@pytest.mark.sampled(24)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("kind", KINDS, ids=KINDS)
def test_each_step_meets_each_fault(kind: str, fault: Fault, subject_of: Callable[[str], Subject]) -> None:
    subject, at = subject_of(kind), 0
    while check(subject, fault, at) >= at:
        at += 1
