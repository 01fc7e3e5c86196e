"""A model's workers in the form that a choice needs: columns with an element for each, rebuilt if a worker changes."""

from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable

import numpy as np
from numpy.typing import NDArray

from saccade.errors import SaccadeError, WorkerUnavailable
from saccade.fleet.canaries import draw
from saccade.fleet.cost import NUM_ROWS, IntArray
from saccade.fleet.index import Partition
from saccade.fleet.lookup import Targets
from saccade.fleet.places import num_places, rows_of
from saccade.fleet.pool import Model
from saccade.fleet.prompt import Prompt, refusal
from saccade.fleet.roles import first_workers, is_decoder, kv_form, sends_kv
from saccade.fleet.router import Option, Router
from saccade.fleet.settings import DispatchLimits
from saccade.fleet.worker import Worker
from saccade.protocol.engine_load import Load
from saccade.protocol.needs import Lacks, Need

NO_LOAD = Load()


class Serving:
    """The workers of *model*, their rows in *router*, and which of them may get a prompt."""

    def __init__(self, model: Model, router: Router, limits: DispatchLimits) -> None:
        self.model = model
        workers = model.workers
        options = [option_of(worker, model) for worker in workers]
        self.rows = np.array([router.describe(option) for option in options], np.int64)
        self.targets = Targets(tuple(one.name for one in options), tuple(one.partition for one in options))
        self.partitions = frozenset(self.targets.partitions)
        self.num_computed = rows_of(limits, model)
        self.num_rows = sum(self.num_computed.values())
        self.most_rows = max(self.num_computed.values())
        self._router = router
        self._place_of = {worker.url: place for place, worker in enumerate(workers)}
        self._num_places = np.array([num_places(limits, model, worker) for worker in workers], np.int64)
        first = first_workers(workers)
        self._are_first = np.array([worker in first for worker in workers], np.bool_)
        self.has_pairs = len(first) < len(workers)
        states = [worker.state for worker in workers]
        descriptions = [one.description or model.description for one in states]
        self._max_lengths = np.array([one.max_model_len for one in descriptions], np.int64)
        self._max_seqs = np.array([one.max_num_seqs for one in descriptions], np.int64)
        self._are_decoders = np.array([is_decoder(one) for one in descriptions], np.bool_)
        self._send_kv = [sends_kv(worker.url, one) for worker, one in zip(workers, descriptions, strict=True)]
        forms = {form: number for number, form in enumerate({kv_form(one) for one in descriptions})}
        self._forms = np.array([forms[kv_form(one)] for one in descriptions], np.int64)
        self._lengths = sorted(set(self._max_lengths.tolist()))
        self._lacks = np.array([one.lacks for one in states], np.int64)
        of_some, of_all = np.bitwise_or.reduce(self._lacks), np.bitwise_and.reduce(self._lacks)
        self.lacks = Lacks(Need(int(of_some)), Need(int(of_all)))
        salts = dict.fromkeys(one.salt for one in states if one.salt is not None)
        self._salts = {salt: number for number, salt in enumerate(salts)}
        self._salt_of = np.array([-1 if one.salt is None else self._salts[one.salt] for one in states], np.int64)
        traffic = [model.traffic.of(worker.url) for worker in workers]
        self._are_canaries = np.array([one.is_canary for one in traffic], np.bool_)
        self._shares = np.array([one.share or 0.0 for one in traffic], np.float64)
        self._has_canaries = bool(self._are_canaries.any())
        self._masks: dict[tuple[int, int, int], NDArray[np.bool_]] = {}

    def key_of(self, prompt: Prompt, places: NDArray[np.intp]) -> Hashable:
        """Return the same for all prompts that wait for the same workers: *places*, all of one side of the canaries."""
        return self._kind_of(prompt), prompt.excluded, bool(self._are_canaries[places[0]])

    def takers_of(self, prompt: Prompt, now: float) -> NDArray[np.intp]:
        """Return the places of the workers that may get *prompt*.

        Breakers never exclude the last worker. A request goes to prefill workers first, and a conversation to its side
        of the canaries. Raises WorkerUnavailable if it excludes all, and the first worker's refusal if none can take
        it.
        """
        mask = self._mask_of(prompt)
        if not np.count_nonzero(mask):
            raise self._refusal(prompt)
        if len(self.rows) > 1:
            mask = self._allowed(mask, now)
            first = mask & self._are_first
            mask = first if np.count_nonzero(first) else mask
        return self._on_side(mask.nonzero()[0], prompt)

    def decoders_of(self, prompt: Prompt, now: float) -> NDArray[np.intp]:
        """Return the places of the decode workers that could serve *prompt* alone now, and have room for it."""
        mask = self._without(self._mask_of(prompt), self._router.breakers.refusing(now))
        places = self._on_side((mask & ~self._are_first).nonzero()[0], prompt)
        return places[self.num_free(places) > 0]

    def partners_of(self, first: Worker, prompt: Prompt, now: float) -> NDArray[np.intp]:
        """Return the places of the decode workers that could continue *prompt* after *first*, a prefill worker.

        There are none for a request of one token, which needs no decode worker.
        """
        place = self._place_of[first.url]
        if not self._send_kv[place] or prompt.sampling.max_tokens == 1:
            return np.zeros(0, np.intp)
        mask = self._are_decoders & (self._forms == self._forms[place]) & (self._max_seqs >= prompt.num_samples)
        return self._on_side(self._allowed(self._without(mask, prompt.excluded), now).nonzero()[0], prompt)

    def num_free(self, places: NDArray[np.intp]) -> IntArray:
        """Return how many more samples the worker at each of *places* may get."""
        free: IntArray = np.maximum(0, self._num_places[places] - self._router.work[NUM_ROWS, self.rows[places]])
        return free

    def is_left(self, tried: Iterable[str]) -> bool:
        """Return whether there is a worker other than those *tried*."""
        return sum(url in self._place_of for url in tried) < len(self.rows)

    def worker(self, url: str) -> Worker:
        """Return the worker at *url*."""
        return self.model.workers[self._place_of[url]]

    def _on_side(self, places: NDArray[np.intp], prompt: Prompt) -> NDArray[np.intp]:
        """Return those of *places* at which the conversation of *prompt* goes on: canaries, or all others.

        The conversation's hash decides, so it stays on its side, at any gateway. If that side has no place, return the
        other one.
        """
        if not self._has_canaries or len(places) < 2:
            return places
        is_drawn = draw(self.model.name, prompt) < self._shares[places].sum()
        side = places[self._are_canaries[places] == is_drawn]
        return side if len(side) else places

    def _mask_of(self, prompt: Prompt) -> NDArray[np.bool_]:
        """Return whether each worker can take *prompt*: it is not excluded, and refusal() returns None for it."""
        kind = self._kind_of(prompt)
        mask = self._masks.get(kind)
        if mask is None:
            needs, _, salt = kind
            mask = (self._lacks & needs == 0) & (self._max_lengths >= prompt.num_tokens)
            self._masks[kind] = mask = mask & ((self._salt_of < 0) | (self._salt_of == salt))
        return self._without(mask, prompt.excluded)

    def _kind_of(self, prompt: Prompt) -> tuple[int, int, int]:
        """Return what decides which workers can take *prompt*: its needs, and the ranks of its length and its salt."""
        length = bisect_left(self._lengths, prompt.num_tokens)
        return int(prompt.needs), length, self._salts.get(prompt.salt, len(self._salts))

    def _allowed(self, mask: NDArray[np.bool_], now: float) -> NDArray[np.bool_]:
        """Return *mask* without the workers that breakers exclude, unless that leaves none."""
        allowed = self._without(mask, self._router.breakers.refusing(now))
        return allowed if np.count_nonzero(allowed) else mask

    def _without(self, mask: NDArray[np.bool_], workers: Collection[str]) -> NDArray[np.bool_]:
        if not workers:
            return mask
        places = [self._place_of[worker] for worker in workers if worker in self._place_of]
        rest = mask.copy()
        rest[places] = False
        return rest

    def _refusal(self, prompt: Prompt) -> SaccadeError:
        """Return why no worker takes *prompt*: the first one's reason."""
        refusals = (refusal(worker.state, prompt) for worker in self.model.workers if worker.url not in prompt.excluded)
        away = WorkerUnavailable("No other worker of the model is ready; try again shortly.")
        return next((error for error in refusals if error is not None), away)


def option_of(worker: Worker, model: Model) -> Option:
    """Return *worker*, which serves *model*, in the router's terms."""
    state = worker.state
    description, load = state.description or model.description, state.load or NO_LOAD
    return Option(
        name=worker.url,
        partition=Partition(description.fingerprint, description.block_size),
        resumes_at_states=description.resumes_at_states,
        reports=state.exactness.level != "NONE",
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        load_times=state.load_times,
        weight=model.traffic.of(worker.url).weight,
    )
