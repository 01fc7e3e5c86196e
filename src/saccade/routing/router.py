"""The router of one gateway: it chooses a worker for a prompt and books the prompt's work there, in one step.

A prompt is its block keys, the places of its pictures and counts; the router sees neither token ids nor pixels.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from saccade.routing.index import BlockIndex, Partition, last_of, num_leading
from saccade.routing.policy import Candidate, Chooser, Policy, WorkInFlight
from saccade.routing.predictions import Predictions


class RoutedPicture(NamedTuple):
    """A picture of a prompt: *key* names it for its tenant; its *num_tokens* tokens end before token *stop*."""

    key: bytes
    stop: int
    num_tokens: int


class RoutedPrompt(NamedTuple):
    """What the choice of a worker looks at.

    *keys* are, by block size, the keys of the blocks that could be reused: the last token is always computed.
    *affinity* is what consistent_hash goes by. *reads_cache* is False for a prompt that is computed as a whole.
    """

    num_tokens: int
    keys: Mapping[int, Sequence[bytes]] = {}
    pictures: Sequence[RoutedPicture] = ()
    affinity: bytes = b""
    reads_cache: bool = True


class Option(NamedTuple):
    """A worker that serves the prompt's model. *encodes* tells by a picture's key whether it must encode it."""

    name: str
    partition: Partition
    resumes_at_states: bool = False
    encodes: Callable[[bytes], bool] = lambda _: True


class Booking:
    """A prompt's place at *worker*, from the choice on until close().

    It is the *chosen* one of *candidates*. *matched_tokens* is what the worker had reported to hold of the prompt when
    it was chosen; None where it reports nothing.
    """

    def __init__(
        self,
        router: "Router",
        chosen: Candidate,
        candidates: Sequence[Candidate],
        work: WorkInFlight,
        predicted: Sequence[bytes],
    ) -> None:
        self.worker = chosen.name
        self.chosen = chosen
        self.candidates = candidates
        self.matched_tokens: int | None = None
        self._router = router
        self._work = work
        self._predicted = predicted
        self._has_begun = False

    def first_token(self, block_size: int) -> None:
        """Note that the prompt is computed: from now on it takes part in decode steps."""
        if not self._has_begun:
            self._has_begun = True
            decoding = self._work._replace(
                prefill_tokens=0, decode_blocks=-(-self._work.num_prompt_tokens // block_size)
            )
            self._router.exchange(self.worker, self._work, decoding)
            self._work = decoding

    def close(self) -> None:
        """Take the work off the worker. Where no token came, take back what was predicted, too."""
        self._router.exchange(self.worker, self._work, WorkInFlight())
        if not self._has_begun:
            self._router.predictions.retract(self.worker, self._predicted)


class Router:
    """Chooses by *policy*. *index* is what workers report; the caller keeps it up to date."""

    def __init__(self, policy: Policy, index: BlockIndex, random: Random) -> None:
        self.index = index
        self.predictions = Predictions()
        self.work: defaultdict[str, WorkInFlight] = defaultdict(WorkInFlight)
        self.policy = policy
        self._chooser = Chooser(policy, random)

    def book(self, options: Sequence[Option], prompt: RoutedPrompt, now: float) -> Booking:
        """Choose one of *options*, of which there is at least one. *now* is a monotonic clock, in seconds."""
        candidates = [self._weigh(option, prompt, now) for option in options]
        chosen = self._choose(self._chooser, options, candidates, prompt)
        option = next(option for option in options if option.name == chosen.name)
        work = WorkInFlight(1, prompt.num_tokens, chosen.left_tokens)
        expected = self._expected(option, prompt)
        booking = Booking(self, chosen, candidates, work, expected)
        if len(options) > 1 and self.index.is_exact(option.name):
            booking.matched_tokens = chosen.overlap_tokens
        self.exchange(option.name, WorkInFlight(), work)
        self.predictions.add(option.name, expected, now)
        return booking

    def preview(self, options: Sequence[Option], prompt: RoutedPrompt, now: float) -> tuple[list[Candidate], Candidate]:
        """Return what book() would look at, and what it would choose; nothing is booked, and nobody's turn is used."""
        candidates = [self._weigh(option, prompt, now) for option in options]
        return candidates, self._choose(copy.deepcopy(self._chooser), options, candidates, prompt)

    def exchange(self, worker: str, old: WorkInFlight, new: WorkInFlight) -> None:
        """Replace *old*, a part of the worker's work, by *new*."""
        self.work[worker] = self.work[worker].minus(old).plus(new)

    def _reported_tokens(self, option: Option, prompt: RoutedPrompt) -> int:
        """Return how many tokens of the prompt the worker is known to hold."""
        keys = prompt.keys.get(option.partition.block_size, ()) if prompt.reads_cache else ()
        return self.index.overlap(option.name, option.partition, keys) * option.partition.block_size

    def _choose(
        self, chooser: Chooser, options: Sequence[Option], candidates: Sequence[Candidate], prompt: RoutedPrompt
    ) -> Candidate:
        reported = any(self.index.is_exact(option.name) for option in options)
        return chooser.choose(candidates, prompt.affinity, reported=reported)

    def _weigh(self, option: Option, prompt: RoutedPrompt, now: float) -> Candidate:
        """Return what the worker holds of the prompt, what it must compute, and what it must encode."""
        overlap = held = self._reported_tokens(option, prompt)
        predicted = self.predictions.held(option.name, now)
        if predicted and prompt.reads_cache:
            keys = prompt.keys.get(option.partition.block_size, ())
            count = last_of(keys, predicted) if option.resumes_at_states else num_leading(keys, predicted)
            held = max(held, count * option.partition.block_size)
        picture_tokens = sum(
            picture.num_tokens
            for picture in prompt.pictures
            if picture.stop > held and picture.key not in predicted and option.encodes(picture.key)
        )
        return Candidate(option.name, self.work[option.name], prompt.num_tokens - held, picture_tokens, overlap, held)

    def _expected(self, option: Option, prompt: RoutedPrompt) -> list[bytes]:
        """Return the keys that the worker will hold when it has computed the prompt.

        A model that resumes at states keeps one behind the prompt's last block; others are not predicted.
        """
        keys = prompt.keys.get(option.partition.block_size, ())
        blocks = keys[-1:] if option.resumes_at_states else keys
        return [*blocks, *(picture.key for picture in prompt.pictures)]
