"""The router of one gateway: it chooses a worker for a prompt and books the prompt's work there, in one step.

To the router, a prompt is its block keys, the places of its images and counts; it sees no token ids or pixels. The
caller has looked up how much of it the workers hold (saccade.fleet.lookup); nothing here waits.

Each worker has a row in columns of numbers, so that a choice takes as many steps for a thousand workers as for two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.fleet.bits import bits_of, members_of, numbers_of
from saccade.fleet.breaker import Breakers
from saccade.fleet.cost import (
    NUM_SAMPLES,
    OFFLOADED_SHARE,
    RECOMPUTE_WEIGHT,
    Candidates,
    Chooser,
    IntArray,
    Policy,
    WorkInFlight,
    seed_of,
)
from saccade.fleet.expectations import (
    ASSUMED_KEYS,
    ASSUMED_SECONDS,
    PREDICTED_KEYS,
    PREDICTED_SECONDS,
    Expectation,
    Expectations,
)
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.kept_images import KeptImages
from saccade.fleet.lookup import Overlaps
from saccade.fleet.own_samples import OwnSamples

NO_ROWS: IntArray = np.zeros(0, np.int64)
NOTHING_HELD = Overlaps.unknown(0)
FIRST_ROWS = 8
"""Rows that there are at first; their number doubles."""


class RoutedImage(NamedTuple):
    """An image of a prompt: *key* names it for its tenant; its *num_tokens* tokens end before token *stop*."""

    key: bytes
    stop: int
    num_tokens: int


class RoutedPrompt(NamedTuple):
    """A prompt as the input of a choice, with the workers that may get it.

    *keys* are the keys of reusable blocks by partition; the last token is always computed. consistent_hash uses
    *affinity*. *reads_cache* is False for a prompt that is computed as a whole. It gets *num_samples* answers, of
    which *num_samples_at_once* are computed at a time. The workers are at *rows*, and hold *overlaps* of it.
    """

    num_tokens: int
    keys: Mapping[Partition, Sequence[bytes]] = {}
    images: Sequence[RoutedImage] = ()
    affinity: bytes = b""
    reads_cache: bool = True
    num_samples: int = 1
    num_samples_at_once: int = 1
    rows: IntArray = NO_ROWS
    overlaps: Overlaps = NOTHING_HELD

    def among(self, rows: IntArray, overlaps: Overlaps) -> "RoutedPrompt":
        """Return the same prompt for the workers at *rows*, which hold *overlaps*."""
        return self._replace(rows=rows, overlaps=overlaps)


class Option(NamedTuple):
    """What a choice must know about a worker.

    If it *reports* the contents of its caches, nothing is assumed about them. By its own report, *num_waiting* samples
    waited there and *num_running* ran at some time between the two of *load_times*. A worker of *weight* 2 is taken to
    be twice as fast as one of weight 1.
    """

    name: str
    partition: Partition
    resumes_at_states: bool = False
    reports: bool = True
    num_waiting: int = 0
    num_running: int = 0
    load_times: tuple[float, float] = (0.0, 0.0)
    weight: float = 1.0


class RoutingChoice(NamedTuple):
    """The result of a choice: the one at *place* of *candidates*, whose names are *workers*.

    *policy* is never auto, but the one that auto meant.
    """

    workers: Sequence[str]
    candidates: Candidates
    place: int
    policy: Policy

    @property
    def worker(self) -> str:
        """The name of the chosen one."""
        return self.workers[self.place]


@dataclass
class Booking:
    """A prompt's place at *worker*, in its *row*, until close(): as *work*, from its first token as *decoding*.

    Both have an element for each field of WorkInFlight.
    When the worker was chosen, it had reported *overlap_tokens* of the prompt, and no candidate had reported more than
    *most_overlap_tokens*. *matched_tokens* are the former, or None if that is not certain. *has_images* has an element
    for each image of the prompt: whether the worker has its encoder output. *expectation* is withdrawn if no token
    comes.
    """

    router: "Router"
    worker: str
    row: int
    work: IntArray
    decoding: IntArray
    overlap_tokens: int
    most_overlap_tokens: int
    matched_tokens: int | None
    has_images: NDArray[np.bool_]
    expectations: Expectations
    expectation: Expectation
    has_begun: bool = False
    has_ended: bool = False

    def first_token(self) -> None:
        """Note that the prompt is computed: from now on its samples decode."""
        if not (self.has_begun or self.has_ended):
            self.has_begun = True
            self.router.work[:, self.row] += self.decoding - self.work
            self.work = self.decoding

    def close(self, now: float) -> None:
        """Take the work off the worker. If no token has come, also withdraw the expectation. Later calls do nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        self.router.work[:, self.row] -= self.work
        self.router.note_samples(self.row, now)
        if not self.has_begun:
            self.expectations.withdraw(self.expectation)


class Router:
    """Chooses by *policy*, at *temperature* (see Chooser), with costs by *recompute_weight* (see Candidates).

    A token in the memory of a worker's CPU counts as *offloaded_share* of one that the worker holds.

    *index* has the workers' reports; the caller keeps it up to date. With *assumes*, a worker that reports nothing is
    assumed to hold the prompts sent there lately. *kept_images* were sent to workers that do not report their images.
    *work* is the work in flight, an array for each field of WorkInFlight, with an element for each row.
    """

    def __init__(
        self,
        policy: Policy,
        index: BlockIndex,
        random: Random,
        temperature: float = 0.0,
        recompute_weight: float = RECOMPUTE_WEIGHT,
        *,
        offloaded_share: float = OFFLOADED_SHARE,
        assumes: bool = True,
    ) -> None:
        self.index = index
        self.policy = policy
        self.predictions = Expectations(PREDICTED_SECONDS, PREDICTED_KEYS)
        self.assumptions = Expectations(ASSUMED_SECONDS, ASSUMED_KEYS)
        self.kept_images = KeptImages()
        self.breakers = Breakers()
        self.work = np.zeros((len(WorkInFlight._fields), FIRST_ROWS), np.int64)
        self._assumes = assumes
        self._recompute_weight = recompute_weight
        self._offloaded_share = offloaded_share
        self._chooser = Chooser(policy, random, temperature)
        self._rows: dict[str, int] = {}
        self._names: list[str] = [""] * FIRST_ROWS
        self._options: list[Option | None] = [None] * FIRST_ROWS
        self._samples: list[OwnSamples] = [OwnSamples() for _ in range(FIRST_ROWS)]
        self._block_sizes = np.ones(FIRST_ROWS, np.int64)
        self._weights = np.ones(FIRST_ROWS, np.float64)
        self._seeds = np.zeros(FIRST_ROWS, np.uint64)
        self._partitions: dict[Partition, int] = {}
        self._partition_numbers = np.zeros(FIRST_ROWS, np.int64)
        self._foreign = np.zeros((2, FIRST_ROWS), np.int64)
        self._assumed_rows = 0
        self._resuming_rows = 0

    def row_of(self, worker: str) -> int:
        """Return the row of *worker*, which is its own until it is forgotten."""
        row = self._rows.get(worker)
        if row is None:
            row = next((row for row, name in enumerate(self._names) if not name), len(self._names))
            if row == len(self._names):
                self._grow()
            self._rows[worker] = row
            self._names[row] = worker
            self._seeds[row] = seed_of(worker.encode())
            self._options[row] = None
        return row

    def describe(self, option: Option) -> int:
        """Note what is known about a worker, including its last report of its load. Return its row."""
        row = self.row_of(option.name)
        if option == self._options[row]:
            return row
        self._options[row] = option
        self._block_sizes[row] = option.partition.block_size
        self._weights[row] = option.weight
        self._partition_numbers[row] = self._partitions.setdefault(option.partition, len(self._partitions))
        own = self._samples[row].most(*option.load_times)
        waiting = max(0, option.num_waiting - own)
        self._foreign[:, row] = waiting, max(0, option.num_waiting + option.num_running - own) - waiting
        self._assumed_rows = _with_bit(self._assumed_rows, row, self._assumes and not option.reports)
        self._resuming_rows = _with_bit(self._resuming_rows, row, option.resumes_at_states)
        return row

    def work_of(self, worker: str) -> WorkInFlight:
        """Return the work in flight at *worker*."""
        row = self._rows.get(worker)
        return WorkInFlight() if row is None else WorkInFlight(*self.work[:, row].tolist())

    def works(self) -> dict[str, WorkInFlight]:
        """Return the work in flight at every worker, by name."""
        return {name: self.work_of(name) for name in self._rows}

    def book(self, prompt: RoutedPrompt, now: float) -> Booking:
        """Choose one of the workers of *prompt*, which must have some, and book the prompt there.

        *now* is a monotonic clock, in seconds.
        """
        candidates = self._weigh(prompt, now)
        place = self._chosen(self._chooser, candidates, prompt)
        row = int(prompt.rows[place])
        option, block_size = self._option(row), int(self._block_sizes[row])
        overlap_tokens, left_tokens = int(candidates.overlap_tokens[place]), int(candidates.left_tokens[place])
        num_blocks, samples = -(-prompt.num_tokens // block_size), (prompt.num_samples, prompt.num_samples_at_once)
        work = np.array((1, prompt.num_tokens, left_tokens, 0, *samples), np.int64)
        expectations = self.assumptions if self._assumed_rows >> row & 1 else self.predictions
        booking = Booking(
            router=self,
            worker=option.name,
            row=row,
            work=work,
            decoding=np.array((1, prompt.num_tokens, 0, num_blocks, *samples), np.int64),
            overlap_tokens=overlap_tokens,
            most_overlap_tokens=int(candidates.overlap_tokens.max()),
            matched_tokens=overlap_tokens if len(prompt.rows) > 1 and prompt.overlaps.are_exact[place] else None,
            has_images=prompt.overlaps.have_images[:, place],
            expectations=expectations,
            expectation=expectations.add(row, _expected(option, prompt, overlap_tokens // block_size), now),
        )
        self.work[:, row] += work
        self.note_samples(row, now)
        self.breakers.on_send(option.name, now)
        return booking

    def num_left(self, prompt: RoutedPrompt, now: float) -> IntArray:
        """Return how many tokens of *prompt* each of its workers must compute, those of images to encode included."""
        return self._weigh(prompt, now).left_tokens

    def preview(self, prompt: RoutedPrompt, now: float) -> RoutingChoice:
        """Return the choice that book() would make, without a booking or a turn."""
        candidates, chooser = self._weigh(prompt, now), self._chooser.copy()
        place = self._chosen(chooser, candidates, prompt)
        workers = [self._names[row] for row in prompt.rows.tolist()]
        return RoutingChoice(workers, candidates, place, chooser.effective(reported=self._is_reported(prompt)))

    def note_samples(self, row: int, now: float) -> None:
        """Note that the number of this gateway's samples at the worker at *row* has changed."""
        self._samples[row].note(int(self.work[NUM_SAMPLES, row]), now)

    def note_away(self, worker: str) -> None:
        """Note that *worker* cannot be reached: when it can be again, its caches may be empty."""
        self.expect_nothing(worker)
        if (row := self._rows.get(worker)) is not None:
            self.kept_images.forget(row)

    def expect_nothing(self, worker: str) -> None:
        """Drop the expectations of *worker*: its caches are gone, or no longer known."""
        if (row := self._rows.get(worker)) is not None:
            self.predictions.forget(row)
            self.assumptions.forget(row)

    def forget(self, worker: str) -> None:
        """Drop everything about *worker*, which left and has no work."""
        self.index.forget(worker)
        self.note_away(worker)
        self.breakers.forget(worker)
        if (row := self._rows.pop(worker, None)) is not None:
            self._names[row], self._options[row], self._samples[row] = "", None, OwnSamples()
            self._chooser.forget(row)
            self.work[:, row] = 0
            self._foreign[:, row] = 0

    def _grow(self) -> None:
        num_more = len(self._names)
        self._names += [""] * num_more
        self._options += [None] * num_more
        self._samples += [OwnSamples() for _ in range(num_more)]
        self.work = np.pad(self.work, ((0, 0), (0, num_more)))
        self._foreign = np.pad(self._foreign, ((0, 0), (0, num_more)))
        self._block_sizes = np.pad(self._block_sizes, (0, num_more), constant_values=1)
        self._weights = np.pad(self._weights, (0, num_more), constant_values=1)
        self._seeds = np.pad(self._seeds, (0, num_more))
        self._partition_numbers = np.pad(self._partition_numbers, (0, num_more))

    def _option(self, row: int) -> Option:
        option = self._options[row]
        if option is None:
            raise ValueError(f"The worker {self._names[row]!r} is not described.")
        return option

    def _chosen(self, chooser: Chooser, candidates: Candidates, prompt: RoutedPrompt) -> int:
        if len(prompt.rows) == 1:
            return 0
        return chooser.choose(candidates, prompt.affinity, reported=self._is_reported(prompt))

    def _is_reported(self, prompt: RoutedPrompt) -> bool:
        """Return whether the contents of a worker's caches are reported or assumed."""
        are_assumed = members_of(self._assumed_rows, prompt.rows)
        return bool(np.count_nonzero(prompt.overlaps.are_exact) or np.count_nonzero(are_assumed))

    def _weigh(self, prompt: RoutedPrompt, now: float) -> Candidates:
        """Return what the workers hold, must compute and must encode, and the work that waits there."""
        rows, overlaps = prompt.rows, prompt.overlaps
        block_sizes = self._block_sizes[rows]
        num_reported = overlaps.num_blocks if prompt.reads_cache else np.zeros(len(rows), np.int64)
        self.predictions.expire(now)
        self.assumptions.expire(now)
        num_held = num_reported
        if prompt.reads_cache and (self.predictions or self.assumptions):
            num_held = np.maximum(num_reported, self._num_expected(prompt, num_reported))
        held_tokens = block_sizes * num_held
        image_tokens = np.zeros(len(rows), np.int64)
        if prompt.images:
            stops = np.array([image.stop for image in prompt.images], np.int64)
            must_encode = (held_tokens < stops[:, np.newaxis]) & ~overlaps.have_images
            for image, at_rows in zip(prompt.images, must_encode, strict=True):
                if expecting := self._rows_expecting(image.key):
                    at_rows &= ~members_of(expecting, rows)
            image_tokens = np.array([image.num_tokens for image in prompt.images], np.int64) @ must_encode
        if prompt.reads_cache and np.count_nonzero(overlaps.num_offloaded):
            num_offloaded = np.maximum(0, num_reported + overlaps.num_offloaded - num_held)
            held_tokens += (self._offloaded_share * block_sizes * num_offloaded).astype(np.int64)
        foreign = self._foreign[:, rows]
        return Candidates(
            rows=rows,
            seeds=self._seeds[rows],
            work=self.work[:, rows],
            prompt_tokens=prompt.num_tokens - held_tokens,
            image_tokens=image_tokens,
            overlap_tokens=block_sizes * num_reported,
            held_tokens=held_tokens,
            foreign_requests=foreign[0],
            foreign_running=foreign[1],
            foreign_decode_blocks=foreign[1] * -(-prompt.num_tokens // block_sizes),
            weights=self._weights[rows],
            recompute_weight=self._recompute_weight,
        )

    def _rows_expecting(self, key: bytes) -> int:
        """Return the rows of workers that are expected to hold *key*, as bits."""
        if not self._assumed_rows:
            return self.predictions.rows_of(key)
        assumed = self._assumed_rows
        return self.predictions.rows_of(key) & ~assumed | self.assumptions.rows_of(key) & assumed

    def _num_expected(self, prompt: RoutedPrompt, num_reported: IntArray) -> NDArray[np.int64]:
        """Return how many of the prompt's blocks each of its workers will hold when the worker's requests have ended.

        They follow those that it reported. A worker that resumes at states holds all up to the last one expected.
        """
        rows = prompt.rows
        expected = np.zeros(len(self._names), np.int64)
        expected[rows] = num_reported
        for partition, keys in prompt.keys.items():
            in_partition = self._partition_numbers[rows] == self._partitions.get(partition, -1)
            self._follow(rows[in_partition], keys, expected)
        return expected[rows]

    def _follow(self, rows: IntArray, keys: Sequence[bytes], lengths: NDArray[np.int64]) -> None:
        """Raise *lengths*, by row, by the blocks of *keys* that follow and are expected at *rows*."""
        resuming = bits_of(rows) & self._resuming_rows
        if resuming:
            self._find_last(resuming, keys, lengths)
            rows = rows[~members_of(resuming, rows)]
        of_rows = lengths[rows]
        for count in np.unique(of_rows).tolist():
            if count == len(keys) or not (expecting := self._rows_expecting(keys[count])):
                continue
            going = bits_of(rows[of_rows == count]) & expecting
            while going:
                count += 1
                on = going & self._rows_expecting(keys[count]) if count < len(keys) else 0
                if stopped := going & ~on:
                    lengths[numbers_of(stopped)] = count
                going = on

    def _find_last(self, rows: int, keys: Sequence[bytes], lengths: NDArray[np.int64]) -> None:
        """Raise *lengths*, by row, to the number of *keys* up to the last one that is expected at each of *rows*."""
        for count in range(len(keys), 0, -1):
            if expecting := rows & self._rows_expecting(keys[count - 1]):
                places = numbers_of(expecting)
                lengths[places] = np.maximum(lengths[places], count)
                rows &= ~expecting
                if not rows:
                    return


def _with_bit(bits: int, number: int, is_set: bool) -> int:
    return bits | 1 << number if is_set else bits & ~(1 << number)


def _expected(option: Option, prompt: RoutedPrompt, num_reported: int) -> list[bytes]:
    """Return the keys that the worker will hold when it has computed the prompt, without those that it reported.

    A model that resumes at states keeps one at the end of the prompt's last block; others are not predicted.
    """
    keys = prompt.keys.get(option.partition, ())
    blocks = keys[max(num_reported, len(keys) - 1) :] if option.resumes_at_states else keys[num_reported:]
    return [*blocks, *(image.key for image in prompt.images)]
