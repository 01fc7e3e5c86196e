"""One engine among clients that send, leave, hang up and empty caches: every answer is the one computed alone."""

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import engines
import pytest
import shadow
from conformance_sample import Seeds
from shadow import BLOCK_SIZE, LONGEST_IMAGE, PLACEHOLDER, SPEC, ShadowExecutor

from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.speculation import OwnDrafts, Speculation
from saccade.engine.loop import Engine
from saccade.protocol.output import FinishReason, StepFrame
from saccade.protocol.request import EngineRequest, MediaPixels, SamplingParams, SupplyPixels

pytestmark = pytest.mark.ci

NUM_CONNECTIONS = 3
NUM_TURNS, MOST_TURNS = 400, 3400
Request = tuple[int, str]
Sample = tuple[int, str, int]


class Clients:
    """An engine of a random shape, its gateways, and what was answered; *failing* is the share of failures.

    With *has_window*, it has layers with a window, and by chance images that are computed whole.
    """

    def __init__(
        self, seed: int, failing: float, steps_ahead: int, speculates: bool = False, has_window: bool = False
    ) -> None:
        self.rng = rng = random.Random(seed)
        num_rows, num_blocks = rng.randint(1, 6), rng.randint(24, 60)
        self.max_model_len = min(num_blocks * BLOCK_SIZE, 120)
        is_recurrent = rng.random() < 0.5 and not has_window
        self.pixels: dict[bytes, bytes] = {}
        # From a second source, so that a seed means the same clients with speculation and without.
        right = (0.0, 0.5, 0.9, 1.0)[seed % 4]
        scripted = shadow.ScriptedProposer(random.Random(seed), right, self.pixels)
        speculation = Speculation(OwnDrafts() if seed % 3 == 0 else scripted, 1 + seed % 5, seed % 3)
        scheduler = shadow.scheduler(
            rng,
            is_recurrent,
            num_rows,
            num_blocks,
            rng.randint(max(4, num_rows), 40),
            num_patches=rng.choice((4, 16, 64)),
            max_num_waiting=rng.choice((3, 50)),
            encoder_cache_bytes=rng.choice((0, 500, 10**6)),
            speculation=speculation if speculates else None,
            window=rng.choice((1, 2, 5, 8, 9, 21)) if has_window else None,
            whole_images=has_window and rng.random() < 0.5,
        )
        whole_images = scheduler.budgets.whole_images
        window_blocks = scheduler.block_manager.window_blocks
        self.executor = ShadowExecutor(rng, is_recurrent, failing, right, window_blocks, whole_images)
        self.engine = Engine(
            self.executor,  # type: ignore[arg-type]
            scheduler,
            RequestValidator(SPEC, b"f" * 32, self.max_model_len),  # type: ignore[arg-type]
            SimpleNamespace(role="both"),  # type: ignore[arg-type]
            steps_ahead=steps_ahead,
        )
        if seed % 2:
            # Steps take any time, so that prompts and images have any part of them.
            scheduler.budgets, times = replace(scheduler.budgets, step_seconds=1.0), random.Random(seed)
            self.engine.clock = accumulate(iter(times.random, None)).__next__  # type: ignore[assignment]
        else:
            engines.untimed(speculation)
        self.requests: dict[Request, EngineRequest] = {}
        self.answers: defaultdict[Sample, list[int]] = defaultdict(list)
        self.ends: dict[Sample, FinishReason] = {}
        self._wanted: list[tuple[int, str, list[int]]] = []

    def run(self) -> None:
        """Do what clients, gateways and the engine do, until nothing is left."""
        for turn in range(MOST_TURNS):
            if turn < NUM_TURNS:
                self._act()
            self._supply()
            if self.engine.has_work:
                self._take(self.engine.step())
            elif turn >= NUM_TURNS and not self._wanted:
                return

    def check(self) -> list[str]:
        """Return what is wrong: work that is left, and answers that differ from those computed alone."""
        load = self.engine.load()
        left = {
            "work": self.engine.has_work,
            "questions": bool(self._wanted),
            "running": load.num_running,
            "waiting": load.num_waiting,
            "blocks": load.num_blocks - load.num_free_blocks,
            "pins": bool(self.engine.scheduler.encoder_scheduler.encoder_cache.pins),
        }
        faults = self.executor.faults + [f"{name} left: {value}" for name, value in left.items() if value]
        for key, request in self.requests.items():
            whole = shadow.answer_alone(request, self.pixels)[: self.max_model_len - len(request.token_ids)]
            for sample in ((*key, index) for index in range(request.num_samples)):
                answer, end = self.answers[sample], self.ends.get(sample)
                if end is None:
                    faults.append(f"{sample} has no end")
                elif answer != (whole if end in (FinishReason.STOP, FinishReason.LENGTH) else whole[: len(answer)]):
                    faults.append(f"{sample} ends with {end}: {answer}, alone {whole}")
        return faults

    def _act(self) -> None:
        rng, chance = self.rng, self.rng.random()
        if chance < 0.35:
            self._submit()
        elif chance < 0.42 and self.requests:
            self.engine.requests.abort(*rng.choice(list(self.requests)), rng.choice((None, 0, 1, 2)))
        elif 0.42 <= chance < 0.43:
            self._hang_up(rng.randrange(NUM_CONNECTIONS))
        elif 0.43 <= chance < 0.45:
            self.engine.scheduler.reset_caches(prefix=rng.random() < 0.5, media=rng.random() < 0.5)

    def _submit(self) -> None:
        rng, name = self.rng, str(len(self.requests))
        token_ids: list[int] = []
        media = []
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.6:
                token_ids += [rng.choice((1, 2)) for _ in range(rng.randint(1, 14))]
            else:
                item = shadow.image(rng.choice(b"abcdef"), rng.randint(1, LONGEST_IMAGE), len(token_ids))
                self.pixels[item.content_hash] = item.inline or b""
                media.append(item)
                token_ids += [PLACEHOLDER] * item.spans[0].length
        items = tuple(item if rng.random() < 0.6 else shadow.without_pixels((item,))[0] for item in media)
        connection = rng.randrange(NUM_CONNECTIONS)
        self.requests[connection, name] = request = EngineRequest(
            request_id=name,
            token_ids=token_ids,
            sampling=SamplingParams(max_tokens=rng.randint(1, 30), temperature=0, stop_token_ids=(rng.randrange(60),)),
            media=items,
            num_samples=rng.choice((1, 1, 1, 2, 3, 4)),
        )
        self.engine.requests.submit(connection, request)

    def _hang_up(self, connection: int) -> None:
        self.engine.requests.hangup(connection)
        for key in [key for key in self.requests if key[0] == connection]:
            for index in range(self.requests[key].num_samples):
                self.ends.setdefault((*key, index), FinishReason.ABORT)
        self._wanted = [question for question in self._wanted if question[0] != connection]

    def _supply(self) -> None:
        """Answer a question for pixels by chance, now and then with one image too few."""
        rng = self.rng
        if not self._wanted or rng.random() < 0.5:
            return
        connection, name, places = self._wanted.pop(rng.randrange(len(self._wanted)))
        if rng.random() < 0.05:
            places = places[:-1]
        items = self.requests[connection, name].media
        found = tuple(MediaPixels(place, inline=self.pixels[items[place].content_hash]) for place in places)
        self.engine.requests.supply(connection, SupplyPixels(request_id=name, media=found))

    def _take(self, frames: Mapping[int, StepFrame]) -> None:
        for connection, frame in frames.items():
            self._wanted += [(connection, one.request_id, list(one.media)) for one in frame.pixels_wanted]
            for delta in frame.deltas:
                key = (connection, delta.request_id)
                if delta.failure is not None:
                    for index in range(self.requests[key].num_samples):
                        self.ends.setdefault((*key, index), FinishReason.ERROR)
                    continue
                sample = (*key, delta.index)
                assert sample not in self.ends, f"{sample} goes on behind its end"
                self.answers[sample] += delta.token_ids
                if delta.finish_reason is not None:
                    self.ends[sample] = delta.finish_reason


def fuzz(seeds: range, failing: float, steps_ahead: int, **kind: bool) -> int:
    """Run an engine for each seed; return how many samples ended by themselves."""
    num_answered = 0
    for seed in seeds:
        clients = Clients(seed, failing, steps_ahead, **kind)
        clients.run()
        assert clients.check() == [], f"seed {seed}, failing {failing}, steps ahead {steps_ahead}, {kind}"
        # A row that speculates is not launched ahead, so with proposals there may be no such step.
        if not (steps_ahead and kind.get("speculates")):
            assert bool(clients.executor.num_launched_ahead) == bool(steps_ahead)
        num_answered += sum(end in (FinishReason.STOP, FinishReason.LENGTH) for end in clients.ends.values())
    return num_answered


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("failing", [0.0, 0.03])
def test_every_answer_is_the_one_computed_alone(failing: float, steps_ahead: int) -> None:
    assert fuzz(range(7), failing, steps_ahead)
    fresh = random.SystemRandom().randrange(10**9)
    print(f"fresh seed {fresh}")
    fuzz(range(fresh, fresh + 1), failing, steps_ahead)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_proposals_change_no_answer(steps_ahead: int) -> None:
    assert fuzz(range(8, 12), 0.0, steps_ahead, speculates=True)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_block_of_a_window_is_given_back_too_early(steps_ahead: int) -> None:
    assert fuzz(range(20, 23), 0.0, steps_ahead, has_window=True)
    assert fuzz(range(24, 25), 0.03, steps_ahead, has_window=True, speculates=True)


@pytest.mark.conformance
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_every_answer_of_many_is_the_one_computed_alone(
    steps_ahead: int, has_window: bool, speculates: bool, share: Seeds
) -> None:
    fresh, kind = random.SystemRandom().randrange(10**9), {"has_window": has_window, "speculates": speculates}
    for failing in (0.0, 0.03):
        fuzz(share(range(1000, 1060 if has_window else 1600)), failing, steps_ahead, **kind)
        fuzz(share(range(fresh, fresh + (10 if has_window else 50))), failing, steps_ahead, **kind)
