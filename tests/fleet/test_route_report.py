"""What an operator is told of the way of a chat."""

import contextlib
from random import Random

import msgspec
import pytest
from fronts import DESCRIPTION
from stub_worker import TEXT_PREFIX, StubWorker, draining, stub

from saccade.fleet.cost import Policy
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.report import CANARY, CORDONED, NO_CANARY, NO_ROOM, RouteReport, route_report
from saccade.fleet.router import Router
from saccade.fleet.settings import DispatchLimits
from saccade.fleet.traffic import FleetTraffic, WorkerTraffic
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.kv_events import BlockStored, KvEvents

PARTITION = Partition(DESCRIPTION.fingerprint, DESCRIPTION.block_size)
PROMPT = Prompt(list(range(100)), (MediaRun(20, 50, b"h" * 32),))
KEYS = block_keys(root_key(PARTITION.fingerprint, b""), PROMPT.token_ids[:-1], PROMPT.runs, PARTITION.block_size)


class Shown:
    """A fleet of described workers, and where the prompt would go in it."""

    def __init__(self, policy: Policy, *workers: StubWorker, temperature: float = 0.0, worker_queue: int = 9) -> None:
        self.worker_pool = WorkerPool((), lambda _: None)
        for worker in workers:
            self.worker_pool.add(worker)
        self.router = Router(policy, BlockIndex(1 << 20), Random(0), temperature)
        self.dispatcher = Dispatcher(self.worker_pool, self.router, limits=DispatchLimits(worker_queue=worker_queue))

    def hold(self, worker: str, count: int) -> None:
        """Have *worker* report the first blocks of the prompt."""
        parents = [b"", *KEYS]
        events = [BlockStored(key, parents[n], [], is_first=not n) for n, key in enumerate(KEYS[:count])]
        self.router.index.begin(worker, PARTITION, resumes_at_states=False)
        self.router.index.take(worker, KvEvents(1, events, snapshot=True))

    async def report(self) -> RouteReport:
        """Ask for the route; nothing listens to the workers here."""
        preview = await self.dispatcher.preview("m", PROMPT)
        return route_report(preview, self.worker_pool, CacheListener(WorkerPool((), lambda _: None), self.router))


FOREIGN = ("foreign_tokens", "foreign_decode_blocks")
A, B = stub("unix:/a", DESCRIPTION), stub("unix:/b", DESCRIPTION)


async def test_overlaps_and_terms_of_each_candidate() -> None:
    shown = Shown("cost", A, B)
    shown.hold("unix:/a", 1)
    shown.hold("unix:/b", 5)
    report = await shown.report()
    assert (report.worker, report.reason, report.policy, report.prompt_tokens) == (
        "unix:/b",
        "the least cost",
        "cost",
        100,
    )
    assert [(place.start, place.tokens) for place in report.images] == [(20, 50)]
    a, b = report.candidates
    assert (a.chosen, a.num_blocks, a.overlap_blocks, a.overlap_tokens) == (False, 6, 1, 16)
    assert (b.chosen, b.num_blocks, b.overlap_blocks, b.overlap_tokens) == (True, 6, 5, 80)
    # The image ends within what B holds, and must be encoded at A.
    assert (a.cost["prompt_tokens"], a.cost["image_tokens"]) == (84, 50)
    assert (b.cost["prompt_tokens"], b.cost["image_tokens"]) == (20, 0)
    for one in (a, b):
        made = one.cost["prompt_tokens"] + one.cost["image_tokens"]
        waits = sum(one.cost[name] for name in ("waiting_prefill_tokens", "decode_blocks", *FOREIGN))
        assert one.cost["total"] == one.recompute_weight * made + waits


@pytest.mark.parametrize(
    ("policy", "temperature", "held", "reasons"),
    [
        ("auto", 0.0, 0, {"drawn at random of 2 with the least cost"}),
        ("round_robin", 0.0, 5, {"chosen by round_robin, whatever the cost"}),
        ("cost", 1000.0, 5, {"the least cost", "drawn at random, by cost and temperature"}),
    ],
)
async def test_every_reason_is_the_one_that_decided(
    policy: Policy, temperature: float, held: int, reasons: set[str]
) -> None:
    shown = Shown(policy, A, B, temperature=temperature)
    shown.hold("unix:/a", 0)
    shown.hold("unix:/b", held)
    first = await shown.report()
    assert (await shown.report()) == first  # a look uses up neither a turn nor a random number
    found = set()
    for _ in range(20):
        found.add((await shown.report()).reason)
        async with shown.dispatcher.place("m", PROMPT):
            pass
    assert found == reasons


async def test_auto_without_any_report_is_by_load() -> None:
    report = await Shown("auto", A, B).report()
    assert (report.policy, report.reason) == ("least_load", "chosen by least_load, whatever the cost")


async def test_workers_that_are_no_candidates_are_named() -> None:
    leaving = draining("unix:/leaving", DESCRIPTION)
    elsewhere = stub("unix:/else", msgspec.structs.replace(DESCRIPTION, model="else"))
    report = await Shown("cost", A, leaving, elsewhere).report()
    assert [(one.worker, one.reason) for one in report.excluded] == [("unix:/leaving", "it drains")]
    assert report.reason == "the only worker that may get it"

    full = Shown("round_robin", A, B, worker_queue=0)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(full.dispatcher.place("m", PROMPT))
        report = await full.report()
        assert [(one.worker, one.reason) for one in report.excluded] == [("unix:/a", NO_ROOM)]
        # Where none has room, the chat would wait for any of them.
        await held.enter_async_context(full.dispatcher.place("m", PROMPT))
        report = await full.report()
        assert (len(report.candidates), report.excluded) == (2, [])


async def test_the_traffic_of_workers_is_shown_and_why_it_excludes_them() -> None:
    shown = Shown("cost", A, B)
    shown.worker_pool.direct(
        FleetTraffic({"unix:/a": WorkerTraffic(weight=2.0), "unix:/b": WorkerTraffic(cordoned=True)})
    )
    report = await shown.report()
    (a,) = report.candidates
    assert (a.weight, a.share, a.cost["total"]) == (2.0, None, 1.5 * 100 / 2)
    assert [(one.worker, one.reason) for one in report.excluded] == [("unix:/b", CORDONED)]


@pytest.mark.parametrize(
    ("share", "chosen", "other", "reason"),
    [(0.0, "unix:/b", "unix:/a", CANARY), (1.0, "unix:/a", "unix:/b", NO_CANARY)],
)
async def test_a_conversation_of_the_other_side_is_the_reason(
    share: float, chosen: str, other: str, reason: str
) -> None:
    shown = Shown("cost", A, B)
    shown.worker_pool.direct(FleetTraffic({"unix:/a": WorkerTraffic(share=share)}))
    report = await shown.report()
    assert report.worker == chosen
    assert [one.worker for one in report.candidates] == [chosen]
    assert [(one.worker, one.reason) for one in report.excluded] == [(other, reason)]


async def test_unknown_overlap_has_its_reason() -> None:
    text = stub("unix:/text", DESCRIPTION, exactness=TEXT_PREFIX)
    shown = Shown("cost", A, text)
    listener = CacheListener(shown.worker_pool, shown.router)
    listener.feed(text).reason = ""
    report = route_report(await shown.dispatcher.preview("m", PROMPT), shown.worker_pool, listener)
    a, known = report.candidates
    assert (a.exactness, a.exactness_reason) == ("NONE", "it is not ready")
    assert (known.exactness, known.exactness_reason) == (TEXT_PREFIX.level, TEXT_PREFIX.reason)
