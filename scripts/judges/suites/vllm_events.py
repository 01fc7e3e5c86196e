"""vLLM's own event classes and ZeroMQ publisher, which Saccade's follower of cache events reads over real sockets."""

import asyncio
import contextlib
import importlib.util
import ipaddress
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from judges.archives import take
from judges.judge import Judge
from judges.outcomes import FAILED, PASSED, SKIPPED, Outcome
from judges.suites.vllm_archive import ARCHIVE
from saccade.connectors.events.event_source import EventSource, event_source
from saccade.connectors.events.named_images import NamedImages, cache_salt, media_identifier
from saccade.connectors.events.published_events import follow
from saccade.connectors.events.reported_cache import KeyContext, ReportedCache
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored

EVENTS, CONFIG = "vllm/distributed/kv_events.py", "vllm/config/kv_events.py"
SIZE = 4
PLACEHOLDER = 9
IMAGE = bytes(range(32))
SALT = b"a tenant"
CONTEXT = KeyContext(b"fingerprint", SIZE, SIZE, 4096)
NAMING = NamedImages(frozenset({PLACEHOLDER}))
SECONDS = 20.0
TEXT = list(range(100, 100 + 2 * SIZE))
PICTURE = [100, *[PLACEHOLDER] * 6, 101]


def load(folder: Path) -> ModuleType:
    """Load vLLM's module of events, with stand-ins for what it imports of the rest of vLLM."""
    stubs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.utils": {"config": dataclass},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils": {},
        "vllm.utils.network_utils": {
            "get_ip": lambda: "127.0.0.1",
            "get_tcp_uri": lambda ip, port: f"tcp://{ip}:{port}",
            "is_valid_ipv6_address": lambda text: ipaddress.ip_address(text).version == 6,
            "split_zmq_path": lambda text: ("tcp", *text.removeprefix("tcp://").rsplit(":", 1)),
        },
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    earlier = dict(sys.modules)
    try:
        for name, names in stubs.items():
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__dict__.update(names)
        _module("vllm.config.kv_events", folder / CONFIG)
        return _module("vllm_kv_events", folder / EVENTS)
    finally:
        for name in set(sys.modules) - set(earlier) - {"vllm_kv_events"}:
            if name.partition(".")[0] == "vllm":
                del sys.modules[name]


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Trial:
    """A publisher of vLLM's, and what a follower has told of it."""

    def __init__(self, vllm: ModuleType, folder: Path, **options: Any) -> None:
        self.vllm = vllm
        ends = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay", "topic": "kv"}
        self.publisher = vllm.ZmqEventPublisher(0, **{**ends, **options})
        described = self.publisher.get_publisher_config()
        found = event_source("127.0.0.1", described.__dict__)
        if found is None:
            raise ValueError(f"no source in {described}")
        self.source: EventSource = found
        self.cache = ReportedCache(CONTEXT, NAMING)
        self.keys: set[bytes] = set()

    def publish(self, *events: Any) -> None:
        """Publish one batch."""
        self.publisher.publish(self.vllm.KVEventBatch(ts=time.time(), events=list(events)))

    def stored(self, token_ids: list[int], names: list[bytes], parent: bytes | None = None, **fields: Any) -> Any:
        """Blocks by vLLM's *names* of them."""
        given = {"medium": "GPU", "lora_id": None, "lora_name": None, "extra_keys": [None] * len(names), **fields}
        return self.vllm.BlockStored(
            block_hashes=names, parent_block_hash=parent, token_ids=token_ids, block_size=SIZE, **given
        )

    def removed(self, *names: bytes) -> Any:
        """Blocks that left the cache."""
        return self.vllm.BlockRemoved(block_hashes=list(names), medium="GPU")

    async def expect(self, keys: Iterable[bytes], level: str = "EXACT", then: Callable[[], None] | None = None) -> None:
        """Follow until the cache is known to hold *keys* at *level*; *then* publishes after the snapshot."""
        wanted = set(keys)
        self.cache = ReportedCache(CONTEXT, NAMING)
        async with asyncio.timeout(SECONDS), contextlib.aclosing(follow(self.source, self.cache)) as feed:
            is_first = True
            async for message in feed:
                for event in message.events:
                    match event:
                        case BlockStored(key):
                            self.keys.add(key)
                        case BlockRemoved(key):
                            self.keys.discard(key)
                if message.snapshot and message.last and is_first and then is not None:
                    is_first = False
                    then()
                elif message.last and self.keys == wanted and self.cache.exactness.level == level:
                    return


def keys_of(token_ids: list[int], salt: bytes = b"", runs: tuple[MediaRun, ...] = ()) -> list[bytes]:
    """Our keys of a prompt's blocks."""
    return block_keys(root_key(CONTEXT.fingerprint, salt), token_ids, runs, SIZE)


A, B, C = (bytes([number]) * 32 for number in range(3))


async def before_the_start(trial: Trial) -> None:
    """What was published before anybody listened is replayed."""
    trial.publish(trial.stored(TEXT, [A, B]))
    await trial.expect(keys_of(TEXT))


async def after_the_start(trial: Trial) -> None:
    """A block that continues one of the snapshot, then a removal."""
    longer = [*TEXT, *range(SIZE)]
    trial.publish(trial.stored(TEXT, [A, B]))

    def publish() -> None:
        trial.publish(trial.stored(longer[-SIZE:], [C], B), trial.removed(A))

    await trial.expect(keys_of(longer)[1:], then=publish)


async def cleared(trial: Trial) -> None:
    """All blocks leave, and one comes."""
    trial.publish(trial.stored(TEXT, [A, B]))

    def publish() -> None:
        trial.publish(trial.vllm.AllBlocksCleared(), trial.stored(PICTURE[:1] * SIZE, [C]))

    await trial.expect(keys_of(PICTURE[:1] * SIZE), then=publish)


async def image(trial: Trial) -> None:
    """An image over two blocks, in the prompt of a tenant with a salt."""
    identifier, salt = media_identifier(SALT, IMAGE), cache_salt(SALT)
    extra = [((identifier, 1), salt), ((identifier, -3),)]
    trial.publish(trial.stored(PICTURE, [A, B], extra_keys=extra))
    await trial.expect(keys_of(PICTURE, SALT, (MediaRun(1, 6, IMAGE),)))


async def elsewhere(trial: Trial) -> None:
    """A copy in memory of the host, or of another host, is none that can be reused at once."""
    trial.publish(
        trial.stored(TEXT[:SIZE], [A], medium="CPU"),
        trial.stored(TEXT[SIZE:], [B], locality="REMOTE"),
        trial.stored(TEXT[:SIZE], [C], ownership="tier", session_id="session", kv_cache_spec_kind="full_attention"),
    )
    await trial.expect(keys_of(TEXT[:SIZE]))


async def other_layers(trial: Trial) -> None:
    """Layers with a window are cached apart: the worker cannot be known exactly."""
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    trial.publish(trial.stored(TEXT, [A, B], group_idx=0, kv_cache_spec_kind="full_attention"))
    trial.publish(trial.stored(TEXT, [A, B], **window))
    await trial.expect(keys_of(TEXT), "DEGRADED")


async def lookahead(trial: Trial) -> None:
    """Blocks that depend on the tokens after them."""
    trial.publish(trial.stored(TEXT, [A, B], lookahead_token_ids=[[1], [2]]))
    await trial.expect(keys_of(TEXT), "DEGRADED")


async def adapter(trial: Trial) -> None:
    """A LoRA adapter's blocks are not the model's."""
    trial.publish(trial.stored(TEXT, [A, B], lora_name="adapter", lora_id=1), trial.stored(TEXT[:SIZE], [C]))
    await trial.expect(keys_of(TEXT[:SIZE]))


async def short_replay(trial: Trial) -> None:
    """A replay that begins late is no whole snapshot."""
    for number in range(4):
        trial.publish(trial.stored([number] * SIZE, [bytes([number]) * 32]))
    await asyncio.sleep(0.5)
    await trial.expect((keys_of([number] * SIZE)[0] for number in (2, 3)), "DEGRADED")


CASES: dict[str, tuple[Callable[[Trial], Awaitable[None]], dict[str, Any]]] = {
    "published before the start": (before_the_start, {}),
    "published after the start": (after_the_start, {}),
    "all cleared": (cleared, {}),
    "an image of a tenant": (image, {}),
    "other media and hosts": (elsewhere, {}),
    "other groups of layers": (other_layers, {}),
    "lookahead": (lookahead, {}),
    "a LoRA adapter": (adapter, {}),
    "a replay buffer of two batches": (short_replay, {"buffer_steps": 2}),
}


def run(cache: Path, skips: frozenset[str]) -> Iterator[Outcome]:
    """Publish and follow each case."""
    vllm = load(take(ARCHIVE, (EVENTS, CONFIG), cache))
    for name, (case, options) in CASES.items():
        name = f"events::{name}"
        if name in skips:
            yield Outcome(name, SKIPPED)
            continue
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(vllm, Path(folder), **options)
            try:
                asyncio.run(case(trial))
                yield Outcome(name, PASSED)
            except Exception as error:  # whatever goes wrong is the case's result
                level = trial.cache.exactness
                yield Outcome(name, FAILED, f"{error!r}; {len(trial.keys)} keys, {level}")
            finally:
                trial.publisher.shutdown()


SAYS = """\
vLLM's own event classes and ZeroMQ publisher, loaded from its two modules, publish what its cache could hold. Saccade's
follower reads them over real sockets, and must know the same blocks. The cases are Saccade's; the bytes are vLLM's."""
JUDGE = Judge("vllm-events", ARCHIVE.release, SAYS, run)
