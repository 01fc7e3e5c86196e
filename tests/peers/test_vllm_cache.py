"""What our keys say of a real vLLM's cache equals what vLLM then finds there, request by request."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import random
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import random_image
from checkpoints import qwen_networks, write_qwen3_vl
from vllm_server import BLOCK_SIZE, VllmServer, vllm

from saccade.cli.model_input import build_prompt
from saccade.connectors.events.event_source import event_source
from saccade.connectors.events.named_images import NamedImages, cache_salt, media_identifier
from saccade.connectors.events.published_events import follow
from saccade.connectors.events.reported_cache import KeyContext, ReportedCache
from saccade.errors import WorkerUnavailable
from saccade.fleet.index import BlockIndex, Partition
from saccade.gateway.served_models.served_model import ServedModel
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.models.files import read_model_files

pytestmark = pytest.mark.peers

FINGERPRINT = b"fingerprint"
PARTITION = Partition(FINGERPRINT, BLOCK_SIZE)
SECONDS = 60.0
QUIET_SECONDS = 0.3
"""vLLM publishes each step's events at once, those of a request's last step before its answer ends or soon after."""

# vLLM's attention on CPUs takes heads of 32 values, not those of the checkpoints that our own engine is tested with.
HEADS_OF_32 = {
    "hidden_size": 128,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
}
CHANGES: dict[str, dict[str, Any]] = {
    # Its special tokens are in tokenizer_config.json only, as in Qwen2-VL-2B.
    "qwen2_vl": HEADS_OF_32 | {"vision_config": {"hidden_size": 128}},
    "qwen2_5_vl": HEADS_OF_32 | {"vision_config": {"out_hidden_size": 128}},
}


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that vLLM serves."""
    target = tmp_path_factory.mktemp("checkpoints") / request.param
    if request.param == "qwen3_vl":
        return write_qwen3_vl(target)
    return qwen_networks.write(target, request.param, CHANGES[request.param])


@pytest.fixture(scope="module")
def worker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM whose cache holds 63 blocks, about ten images with their questions."""
    with vllm(folder, tmp_path_factory.mktemp("vllm"), num_blocks=64) as server:
        yield server


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the gateway makes it, and *features*, what vLLM gets for its images."""

    token_ids: list[int]
    runs: tuple[MediaRun, ...]
    features: dict[str, Any] | None
    salt: bytes

    @property
    def keys(self) -> list[bytes]:
        return block_keys(root_key(FINGERPRINT, self.salt), self.token_ids, self.runs, BLOCK_SIZE)

    def after(self, answer: list[int], more: list[int]) -> "Prompt":
        """Return the prompt of a next turn."""
        return dataclasses.replace(self, token_ids=self.token_ids + answer + more)


class Gateway:
    """The parts of a gateway that this needs: prompts, the index of what the worker holds, and requests."""

    def __init__(self, worker: VllmServer, folder: Path) -> None:
        self.index = BlockIndex(1 << 30)
        self.served = ServedModel.from_files("m", read_model_files(folder), 1024)
        naming = NamedImages(frozenset({self.served.placeholder_token_id}))
        self.cache = ReportedCache(KeyContext(FINGERPRINT, BLOCK_SIZE, BLOCK_SIZE, 1024), naming)
        self._worker = worker
        self._messages = 0

    async def prompt(self, *seeds: int, question: str, salt: bytes = b"") -> Prompt:
        """Return the prompt of images, by their seeds, and a question."""
        encoded = [_png(seed) for seed in seeds]
        images, draft = await build_prompt(self.served, encoded, question)
        spans = [span for (span,) in draft.spans]
        hashes = [one.content_hash for one in images]
        runs = tuple(MediaRun(span.start, span.length, one) for span, one in zip(spans, hashes, strict=True))
        features = await self._features(encoded, question, draft.token_ids) if seeds else None
        if features is not None:
            features["mm_hashes"] = {"image": [media_identifier(salt, one) for one in hashes]}
            features["mm_placeholders"] = {"image": [{"offset": s.start, "length": s.length} for s in spans]}
        return Prompt(draft.token_ids, runs, features, salt)

    async def _features(self, encoded: list[bytes], question: str, token_ids: list[int]) -> dict[str, Any]:
        """Return vLLM's own tensors of the images; its token ids of the chat must be ours."""
        urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in encoded]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
        rendered = await self.call("/v1/chat/completions/render", {"model": "m", "messages": messages})
        assert rendered["token_ids"] == token_ids  # E1
        return dict(rendered["features"])

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(self._worker.call, path, body, method="POST")

    async def listen(self) -> None:
        """Keep the index up to date."""
        sources = await asyncio.to_thread(self._worker.call, "/kv_event_sources")
        source = event_source("127.0.0.1", sources["0"])
        assert source is not None
        self.index.begin("w", PARTITION, resumes_at_states=False)
        async with contextlib.aclosing(follow(source, self.cache)) as messages:
            async for message in messages:
                self._messages += 1
                assert self.index.take("w", message) == 0  # orphans

    def overlap(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the worker is known to hold; the last token is always computed."""
        return BLOCK_SIZE * min(self._held(prompt.keys), (len(prompt.token_ids) - 1) // BLOCK_SIZE)

    def _held(self, keys: list[bytes]) -> int:
        return int(self.index.overlaps(PARTITION, keys)[self.index.places_of(["w"])[0]])

    async def ask(self, prompt: Prompt, max_tokens: int = 1) -> tuple[list[int], int]:
        """Return the answer's token ids, and how many of the prompt's tokens vLLM found in its cache."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"model": "m", "token_ids": prompt.token_ids, "sampling_params": sampling, "features": prompt.features}
        answer = await self.call("/inference/v1/generate", body | {"cache_salt": cache_salt(prompt.salt)})
        return answer["choices"][0]["token_ids"], _cached_tokens(answer["usage"])

    async def settle(self, prompt: Prompt) -> None:
        """Wait until what the worker did for a prompt has been reported."""
        keys, seen = prompt.keys, -1
        async with asyncio.timeout(SECONDS):
            while self._held(keys) < len(keys) or self._messages != seen:
                seen = self._messages
                await asyncio.sleep(QUIET_SECONDS)

    async def check(self, prompt: Prompt, max_tokens: int = 1) -> tuple[list[int], int]:
        """Ask, and check that vLLM finds as much in its cache as is known here."""
        expected = self.overlap(prompt)
        answer, cached = await self.ask(prompt, max_tokens)
        assert cached == expected
        await self.settle(prompt)
        return answer, cached


def _cached_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage
    return int(details.get("cached_tokens") or 0)


def _png(seed: int) -> bytes:
    buffer = io.BytesIO()
    random_image(320, 288, seed).save(buffer, "PNG")
    return buffer.getvalue()


@contextlib.asynccontextmanager
async def listening(worker: VllmServer, folder: Path) -> AsyncGenerator[Gateway, None]:
    """A gateway that listens to the worker, whose cache is empty."""
    await asyncio.to_thread(worker.call, "/reset_prefix_cache", method="POST")
    gateway = Gateway(worker, folder)
    task = asyncio.create_task(gateway.listen())
    try:
        async with asyncio.timeout(SECONDS):
            while not gateway.index.is_exact("w"):
                await asyncio.sleep(0.01)
                assert not task.done() or task.result()
        # vLLM reports an emptied cache with the next step.
        await gateway.ask(await gateway.prompt(question="Is anything there?"))
        await asyncio.sleep(QUIET_SECONDS)
        yield gateway
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_known_equals_what_vllm_finds(worker: VllmServer, folder: Path) -> None:  # E1 E5 E7 E8
    async with listening(worker, folder) as gateway:
        cat = await gateway.prompt(1, question="What is in this image? Please tell me in a few words.")
        _, fresh = await gateway.check(cat)
        _, repeated = await gateway.check(cat)
        assert fresh == 0
        assert repeated == BLOCK_SIZE * ((len(cat.token_ids) - 1) // BLOCK_SIZE) > 0
        _, other_question = await gateway.check(await gateway.prompt(1, question="Why?"))
        assert other_question > 0
        # An image of the same size gives the same token ids, so only its identity tells it apart.
        dog = await gateway.prompt(2, question="What is in this image? Please tell me in a few words.")
        assert dog.token_ids == cat.token_ids
        _, cached = await gateway.check(dog)
        assert cached <= BLOCK_SIZE * (cat.runs[0].start // BLOCK_SIZE)
        both = await gateway.prompt(1, 2, question="Compare them.")
        _, cached = await gateway.check(both)
        assert cached > 0
        tenant = await gateway.prompt(1, question="What is in this image?", salt=b"tenant")
        assert (await gateway.check(tenant))[1] == 0
        assert (await gateway.check(tenant))[1] > 0
        assert gateway.cache.exactness.level == "EXACT"


async def test_an_answer_s_blocks_are_known_too(worker: VllmServer, folder: Path) -> None:  # E6
    async with listening(worker, folder) as gateway:
        first = await gateway.prompt(3, question="Describe it at length.")
        answer, _ = await gateway.check(first, max_tokens=2 * BLOCK_SIZE)
        _, cached = await gateway.check(first.after(answer, [5, 6, 7]))
        assert cached > len(first.token_ids)


async def test_what_leaves_a_full_cache_is_known(worker: VllmServer, folder: Path) -> None:  # E5
    async with listening(worker, folder) as gateway:
        order = random.Random(7)
        prompts = [await gateway.prompt(seed, question=f"Question {seed}?") for seed in range(20, 42)]
        found = [(await gateway.check(order.choice(prompts)))[1] for _ in range(40)]
        # The cache holds many of these prompts, not all.
        assert 0 in found[20:]
        assert any(found[20:])
        assert gateway.cache.exactness.level == "EXACT"


async def test_a_cache_that_was_emptied_is_known_to_be_empty(worker: VllmServer, folder: Path) -> None:  # E5
    async with listening(worker, folder) as gateway:
        prompt = await gateway.prompt(4, question="What is it?")
        await gateway.check(prompt)
        await asyncio.to_thread(worker.call, "/reset_prefix_cache", method="POST")
        other = await gateway.prompt(question="A step, with which vLLM reports what it did before. " * 4)
        await gateway.ask(other)
        await gateway.settle(other)
        assert gateway.overlap(prompt) == 0
        assert (await gateway.check(prompt))[1] == 0


async def test_a_gateway_that_comes_late_learns_the_same(worker: VllmServer, folder: Path) -> None:  # E5
    async with listening(worker, folder) as gateway:
        prompt = await gateway.prompt(5, question="What was it?")
        await gateway.check(prompt)
        late = Gateway(worker, folder)
        task = asyncio.create_task(late.listen())
        await late.settle(prompt)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert late.cache.exactness.level == "EXACT"
        assert late.index.num_blocks("w") == gateway.index.num_blocks("w")
        assert late.overlap(prompt) == gateway.overlap(prompt) > 0


async def test_a_worker_that_dies_is_no_longer_known(tiny_qwen3_vl: Path, tmp_path: Path) -> None:  # E5
    with vllm(tiny_qwen3_vl, tmp_path) as worker:
        gateway = Gateway(worker, tiny_qwen3_vl)
        task = asyncio.create_task(gateway.listen())
        prompt = await gateway.prompt(6, question="Are you there?")
        await gateway.ask(prompt)
        await gateway.settle(prompt)
    with pytest.raises(WorkerUnavailable):
        await task
