"""The router of one gateway: it chooses a worker for a prompt and books the prompt's work there, in one step.

A prompt is its block keys, the places of its images and counts; the router sees neither token ids nor pixels. The
caller has looked up how much of it the workers hold (saccade.fleet.lookup); nothing here waits.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from random import Random
from typing import NamedTuple

from saccade.fleet.breaker import Breakers
from saccade.fleet.cost import RECOMPUTE_WEIGHT, Candidate, Chooser, Policy, WorkInFlight
from saccade.fleet.expectations import ASSUMED_KEYS, ASSUMED_SECONDS, PREDICTED_KEYS, PREDICTED_SECONDS, Predictions
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import UNKNOWN, Overlap
from saccade.fleet.own_samples import OwnSamples


class RoutedImage(NamedTuple):
    """An image of a prompt: *key* names it for its tenant; its *num_tokens* tokens end before token *stop*."""

    key: bytes
    stop: int
    num_tokens: int


class RoutedPrompt(NamedTuple):
    """The input of the choice.

    *keys* are the keys of reusable blocks by partition; the last token is always computed. consistent_hash uses
    *affinity*. *reads_cache* is False for a prompt that is computed as a whole. It has *num_samples* answers, of
    which *num_rows* are computed at a time.
    """

    num_tokens: int
    keys: Mapping[Partition, Sequence[bytes]] = {}
    images: Sequence[RoutedImage] = ()
    affinity: bytes = b""
    reads_cache: bool = True
    num_samples: int = 1
    num_rows: int = 1


class Option(NamedTuple):
    """A worker that serves the prompt's model.

    *encodes* returns by an image's key whether the worker must encode it. *reports*: it reports the contents of its
    caches, so that nothing is assumed. By its own report *num_waiting* samples waited there and *num_running* ran at
    some time between the two of *load_times*.
    """

    name: str
    partition: Partition
    resumes_at_states: bool = False
    encodes: Callable[[bytes], bool] = lambda _: True
    reports: bool = True
    num_waiting: int = 0
    num_running: int = 0
    load_times: tuple[float, float] = (0.0, 0.0)


class RoutingChoice(NamedTuple):
    """*chosen* is one of *candidates*, by *policy*, which is never auto but the policy that it resolved to."""

    candidates: Sequence[Candidate]
    chosen: Candidate
    policy: Policy


@dataclass
class Booking:
    """A prompt's place at *worker*, from the *choice* on until close(): as *work*, from its first token as *decoding*.

    *matched_tokens* of the prompt were in the worker's reports when it was chosen; None if it reports nothing. *undo*
    withdraws the expectation of its keys.
    """

    router: "Router"
    choice: RoutingChoice
    work: WorkInFlight
    decoding: WorkInFlight
    matched_tokens: int | None
    undo: Callable[[], None]
    has_begun: bool = False
    has_ended: bool = False

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return self.choice.chosen.name

    def first_token(self) -> None:
        """Note that the prompt is computed: from now on its samples decode."""
        if not (self.has_begun or self.has_ended):
            self.has_begun = True
            self.router.exchange(self.worker, self.work, self.decoding)
            self.work = self.decoding

    def close(self, now: float) -> None:
        """Take the work off the worker. If no token came, withdraw its expectation, too. Later calls do nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        self.router.exchange(self.worker, self.work, WorkInFlight())
        self.router.note_samples(self.worker, now)
        if not self.has_begun:
            self.undo()


class Router:
    """Chooses by *policy*, at *temperature* (see Chooser), with costs by *recompute_weight* (see Candidate).

    *index* has the workers' reports; the caller keeps it up to date. With *assumes*, a worker that reports nothing is
    assumed to hold the prompts sent there lately.
    """

    def __init__(
        self,
        policy: Policy,
        index: BlockIndex,
        random: Random,
        temperature: float = 0.0,
        recompute_weight: float = RECOMPUTE_WEIGHT,
        *,
        assumes: bool = True,
    ) -> None:
        self.index = index
        self.policy = policy
        self.predictions = Predictions(PREDICTED_SECONDS, PREDICTED_KEYS)
        self.assumptions = Predictions(ASSUMED_SECONDS, ASSUMED_KEYS)
        self.breakers = Breakers()
        self.work: defaultdict[str, WorkInFlight] = defaultdict(WorkInFlight)
        self._samples: defaultdict[str, OwnSamples] = defaultdict(OwnSamples)
        self._assumes = assumes
        self._recompute_weight = recompute_weight
        self._chooser = Chooser(policy, random, temperature)

    def book(
        self, options: Sequence[Option], prompt: RoutedPrompt, overlaps: Mapping[str, Overlap], now: float
    ) -> Booking:
        """Choose one of *options*, one or more, and book the prompt there.

        *overlaps* has the prefixes that workers hold, by name. *now* is a monotonic clock, in seconds.
        """
        choice = self._choose(self._chooser, options, prompt, overlaps, now)
        chosen = choice.chosen
        option = next(option for option in options if option.name == chosen.name)
        work = WorkInFlight(1, prompt.num_tokens, chosen.left_tokens, 0, prompt.num_samples, prompt.num_rows)
        predictions = self._predictions(option)
        expectation = predictions.add(option.name, _expected(option, prompt, chosen), now)
        decoding = work._replace(prefill_tokens=0, decode_blocks=-(-prompt.num_tokens // option.partition.block_size))
        is_known = len(options) > 1 and overlaps.get(option.name, UNKNOWN).is_exact
        matched_tokens = chosen.overlap_tokens if is_known else None
        undo = partial(predictions.withdraw, option.name, expectation)
        booking = Booking(self, choice, work, decoding, matched_tokens, undo)
        self.exchange(option.name, WorkInFlight(), work)
        self.note_samples(option.name, now)
        self.breakers.on_send(option.name, now)
        return booking

    def preview(
        self, options: Sequence[Option], prompt: RoutedPrompt, overlaps: Mapping[str, Overlap], now: float
    ) -> RoutingChoice:
        """Return the choice that book() would make, without a booking or a turn."""
        return self._choose(copy.deepcopy(self._chooser), options, prompt, overlaps, now)

    def exchange(self, worker: str, old: WorkInFlight, new: WorkInFlight) -> None:
        """Replace *old*, a part of the worker's work, by *new*."""
        self.work[worker] = self.work[worker].minus(old).plus(new)

    def note_samples(self, worker: str, now: float) -> None:
        """Note that the number of this gateway's samples at *worker* has changed."""
        self._samples[worker].note(self.work[worker].num_samples, now)

    def expect_nothing(self, worker: str) -> None:
        """Drop the expectations of *worker*: its caches are gone, or no longer known."""
        self.predictions.forget(worker)
        self.assumptions.forget(worker)

    def forget(self, worker: str) -> None:
        """Drop everything about *worker*, which left and has no work."""
        self.index.forget(worker)
        self.expect_nothing(worker)
        self.breakers.forget(worker)
        self.work.pop(worker, None)
        self._samples.pop(worker, None)

    def _is_assumed(self, option: Option) -> bool:
        return self._assumes and not option.reports

    def _predictions(self, option: Option) -> Predictions:
        return self.assumptions if self._is_assumed(option) else self.predictions

    def _choose(
        self,
        chooser: Chooser,
        options: Sequence[Option],
        prompt: RoutedPrompt,
        overlaps: Mapping[str, Overlap],
        now: float,
    ) -> RoutingChoice:
        candidates = [self._weigh(option, prompt, overlaps, now) for option in options]
        is_reported = any(self._is_assumed(option) or overlaps.get(option.name, UNKNOWN).is_exact for option in options)
        chosen = chooser.choose(candidates, prompt.affinity, reported=is_reported)
        return RoutingChoice(candidates, chosen, chooser.effective(reported=is_reported))

    def _weigh(self, option: Option, prompt: RoutedPrompt, overlaps: Mapping[str, Overlap], now: float) -> Candidate:
        """Return the worker as a candidate: what it holds, must compute and must encode, and its waiting work."""
        block_size, work = option.partition.block_size, self.work[option.name]
        keys = prompt.keys.get(option.partition, ()) if prompt.reads_cache else ()
        num_reported = overlaps.get(option.name, UNKNOWN).num_blocks if prompt.reads_cache else 0
        expected = self._predictions(option).expected(option.name, now)
        held_tokens = block_size * max(num_reported, _num_held(option, keys, num_reported, expected))
        image_tokens = sum(
            image.num_tokens
            for image in prompt.images
            if image.stop > held_tokens and image.key not in expected and option.encodes(image.key)
        )
        own = self._samples[option.name].most(*option.load_times)
        foreign_requests = max(0, option.num_waiting - own)
        foreign_running = max(0, option.num_waiting + option.num_running - own) - foreign_requests
        return Candidate(
            name=option.name,
            work=work,
            prompt_tokens=prompt.num_tokens - held_tokens,
            image_tokens=image_tokens,
            overlap_tokens=block_size * num_reported,
            held_tokens=held_tokens,
            foreign_requests=foreign_requests,
            foreign_running=foreign_running,
            foreign_decode_blocks=foreign_running * -(-prompt.num_tokens // block_size),
            recompute_weight=self._recompute_weight,
        )


def _num_held(option: Option, keys: Sequence[bytes], num_reported: int, expected: Mapping[bytes, float]) -> int:
    """Return how many of *keys* the worker will hold once its pending requests finish."""
    if not expected:
        return num_reported
    if option.resumes_at_states:
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in expected), 0)
    return num_reported + sum(1 for _ in takewhile(expected.__contains__, keys[num_reported:]))


def _expected(option: Option, prompt: RoutedPrompt, chosen: Candidate) -> list[bytes]:
    """Return the keys that the worker will hold when it has computed the prompt, without those that it reported.

    A model that resumes at states keeps one at the end of the prompt's last block; others are not predicted.
    """
    keys = prompt.keys.get(option.partition, ())
    num_reported = chosen.overlap_tokens // option.partition.block_size
    blocks = keys[max(num_reported, len(keys) - 1) :] if option.resumes_at_states else keys[num_reported:]
    return [*blocks, *(image.key for image in prompt.images)]
