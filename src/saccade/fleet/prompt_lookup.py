"""Looks up what workers hold of a prompt, and returns it in the form that a choice needs."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from saccade.errors import WorkerUnavailable
from saccade.fleet.bits import members_of
from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.index import Partition, image_key
from saccade.fleet.lookup import Lookup, Overlaps
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.prompt_keys import PromptKeys
from saccade.fleet.router import RoutedImage, RoutedPrompt, Router
from saccade.fleet.serving import Serving
from saccade.identity.blocks import root_key


class PromptLookup:
    """Asks *lookup* for what the workers of a model hold of a prompt; *router* knows which images were sent where.

    Workers may leave meanwhile: *worker_pool* has those that are still ready. *prompt_keys* remembers block keys.
    """

    def __init__(self, worker_pool: WorkerPool, router: Router, lookup: Lookup, metrics: DecisionMetrics) -> None:
        self.prompt_keys = PromptKeys()
        self._worker_pool = worker_pool
        self._router = router
        self._lookup = lookup
        self._metrics = metrics

    async def look_up(
        self, serving: Serving, places: NDArray[np.intp], prompt: Prompt, num_at_once: int
    ) -> RoutedPrompt:
        """Return what the router needs to choose a worker at *places*. Raises WorkerUnavailable if none is ready."""
        if len(places) > 1:
            return await self.find(serving, places, prompt, num_at_once)
        routed = RoutedPrompt(len(prompt.token_ids), num_samples=prompt.num_samples, num_samples_at_once=num_at_once)
        if not prompt.runs:
            return routed.among(serving.rows[places], Overlaps.unknown(1))
        # There is nothing to choose, but images that the worker holds are not sent.
        images = _image_keys(prompt)
        overlaps = await self._lookup.overlaps(serving.targets, {}, images)
        return self._among(serving, places, routed, images, overlaps)

    async def find(self, serving: Serving, places: NDArray[np.intp], prompt: Prompt, num_at_once: int) -> RoutedPrompt:
        """Look up what the workers at *places* hold of *prompt*. Raises WorkerUnavailable if none is ready."""
        images = _image_keys(prompt)
        with self._metrics.stage("keys"):
            routed = self._with_keys(prompt, images, serving.partitions, num_at_once)
        with self._metrics.stage("lookup"):
            overlaps = await self._lookup.overlaps(serving.targets, routed.keys, images)
        return self._among(serving, places, routed, images, overlaps)

    def _among(
        self,
        serving: Serving,
        places: NDArray[np.intp],
        routed: RoutedPrompt,
        images: Sequence[bytes],
        overlaps: Overlaps,
    ) -> RoutedPrompt:
        """Return *routed* for those of *places* that are still ready. Raises WorkerUnavailable if none is."""
        now = self._worker_pool.model(serving.model.name)
        if now is not serving.model:
            workers, urls = serving.model.workers, {worker.url for worker in now.workers}
            places = np.array([place for place in places.tolist() if workers[place].url in urls], np.intp)
        if not len(places):
            raise WorkerUnavailable(f"No worker of the model {serving.model.name!r} is ready; try again shortly.")
        rows = serving.rows
        if len(places) < len(rows):
            rows, overlaps = rows[places], overlaps.at(places)
        if images and (kept_images := self._router.kept_images):
            for key, have_image in zip(images, overlaps.have_images, strict=True):
                have_image |= members_of(kept_images.rows_of(key), rows)
        return routed.among(rows, overlaps)

    def _with_keys(
        self, prompt: Prompt, images: Sequence[bytes], partitions: Iterable[Partition], num_at_once: int
    ) -> RoutedPrompt:
        """Return the prompt in the router's terms, with keys for *images*, and without workers yet."""
        num_tokens = len(prompt.token_ids)
        # The last token is always computed, so its block is never reused.
        token_ids = prompt.token_ids[: num_tokens - 1]
        keys = {
            partition: self.prompt_keys.of(
                root_key(partition.fingerprint, prompt.salt), token_ids, prompt.runs, partition.block_size
            )
            for partition in partitions
        }
        routed_images = tuple(
            RoutedImage(key, run.start + run.length, run.length) for key, run in zip(images, prompt.runs, strict=True)
        )
        # Only this policy uses it, and without images it takes a hash.
        affinity = _affinity(prompt) if self._router.policy == "consistent_hash" else b""
        return RoutedPrompt(
            num_tokens, keys, routed_images, affinity, prompt.reads_cache, prompt.num_samples, num_at_once
        )


def _affinity(prompt: Prompt) -> bytes:
    if prompt.runs:
        return prompt.salt + prompt.runs[0].content_hash
    return prompt.beginning_key(prompt.salt)


def _image_keys(prompt: Prompt) -> list[bytes]:
    return [image_key(prompt.salt, run.content_hash) for run in prompt.runs]
