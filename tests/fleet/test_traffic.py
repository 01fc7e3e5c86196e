"""An operator cordons workers, weighs them, and gives canaries a share of the conversations."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import msgspec
import pytest
from fronts import DESCRIPTION
from stub_worker import StubWorker, stub
from tables import table
from waiting import until

from saccade.errors import StartupError, WorkerUnavailable
from saccade.fleet.cost import Policy
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.index import BlockIndex
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.router import Router
from saccade.fleet.settings import DEFAULT_LIMITS, DispatchLimits
from saccade.fleet.traffic import OPTIONS, FleetTraffic, TrafficChange, WorkerTraffic, read_traffic

CORDONED = WorkerTraffic(cordoned=True)
CANARY = WorkerTraffic(share=0.1)


@table(
    ("line", "traffic"),
    [
        ("", WorkerTraffic()),
        ("cordoned", WorkerTraffic(cordoned=True)),
        ("share=12.5% weight=0.5 cordoned", WorkerTraffic(cordoned=True, weight=0.5, share=0.125)),
        ("share=0% weight=1000", WorkerTraffic(weight=1000.0, share=0.0)),
        ("share=100%", WorkerTraffic(share=1.0)),
    ],
)
def test_options_are_read_and_written_alike(line: str, traffic: WorkerTraffic) -> None:
    assert read_traffic(line.split()) == traffic
    assert read_traffic(str(traffic).split()) == traffic


@table(
    "line",
    [
        *("weight", "weight=", "weight=0", "weight=-1", "weight=1001", "weight=1e2", "weight=nan", "weight=1/2"),
        *("share", "share=%", "share=10", "share=0.1", "share=101%", "share=-1%", "cordoned=true", "Cordoned"),
        *("weight=1 weight=1", "cordoned cordoned", "drain", "=", "weight=٣"),
    ],
)
def test_malformed_options_are_refused(line: str) -> None:
    with pytest.raises(StartupError, match=re.escape(OPTIONS)):
        read_traffic(line.split())


def test_a_change_wins_over_what_a_source_lists_field_by_field() -> None:
    lists = {"a": WorkerTraffic(cordoned=True, weight=0.5), "b": WorkerTraffic(share=0.1)}
    traffic = FleetTraffic(lists, {"a": TrafficChange(cordoned=False), "c": TrafficChange(weight=2.0, share=0.2)})
    assert traffic.of("a") == WorkerTraffic(weight=0.5)
    assert traffic.of("b") == WorkerTraffic(share=0.1)
    assert traffic.of("c") == WorkerTraffic(weight=2.0, share=0.2)


class Directed:
    """A fleet of workers with the traffic that a test gives it."""

    def __init__(
        self,
        *workers: StubWorker,
        policy: Policy = "auto",
        limits: DispatchLimits = DEFAULT_LIMITS,
        **traffic: WorkerTraffic,
    ) -> None:
        self.worker_pool = WorkerPool((), lambda _: None)
        self.workers = {worker.url: worker for worker in workers or (stub(name, DESCRIPTION) for name in "abc")}
        for worker in self.workers.values():
            self.worker_pool.add(worker)
        self.direct(traffic)
        self.dispatcher = Dispatcher(self.worker_pool, Router(policy, BlockIndex(1 << 20), Random(0)), limits=limits)

    def direct(self, traffic: Mapping[str, WorkerTraffic]) -> None:
        self.worker_pool.direct(FleetTraffic(traffic))

    def change(self, worker: str, *, ready: bool) -> None:
        """Have *worker* go or come back."""
        self.workers[worker].become(ready=ready)
        self.worker_pool.changed(self.workers[worker])

    async def worker_of(self, prompt: Prompt) -> str:
        """Place *prompt*, and return the url of its worker."""
        async with self.dispatcher.place("m", prompt) as placement:
            return placement.worker.url

    async def counts(self, number: int) -> Counter[str]:
        """Place the first turns of *number* conversations, one after the other."""
        return Counter([await self.worker_of(turn(one)) for one in range(number)])


def turn(conversation: int, number: int = 0, tenant: bytes = b"t") -> Prompt:
    """A turn of a conversation: its prompt is longer than that of the turn before."""
    token_ids = [conversation % 1000 + 1] * (20 + 30 * number)
    return Prompt(token_ids, tenant=tenant, conversation=conversation.to_bytes(4, "little"))


async def test_a_cordoned_worker_gets_no_request_and_finishes_its_own() -> None:
    fleet = Directed(policy="round_robin")
    async with fleet.dispatcher.place("m", turn(0)) as placement:
        assert placement.worker.url == "a"
        fleet.direct({"a": CORDONED})
        assert set(await fleet.counts(20)) == {"b", "c"}
        assert fleet.dispatcher.num_requests_at("a") == 1
        placement.first_token()
    assert fleet.dispatcher.num_requests_at("a") == 0
    fleet.direct({})
    assert set(await fleet.counts(20)) == {"a", "b", "c"}


async def test_without_a_worker_that_is_not_cordoned_requests_are_refused() -> None:
    fleet = Directed(a=CORDONED, b=CORDONED, c=CORDONED)
    with pytest.raises(WorkerUnavailable):
        await fleet.worker_of(turn(0))


async def test_a_request_that_waits_goes_to_the_worker_that_is_no_longer_cordoned() -> None:
    fleet = Directed(b=CORDONED, c=CORDONED, limits=DispatchLimits(worker_queue=0, lone_worker_queue=0))
    async with fleet.dispatcher.place("m", turn(0)):
        waiting = asyncio.create_task(fleet.worker_of(turn(1)))
        await until(lambda: fleet.dispatcher.num_waiting == 1)
        fleet.direct({"c": CORDONED})
        assert await waiting == "b"


def pairs(**traffic: WorkerTraffic) -> Directed:
    """The prefill workers p and q, and the decode workers d and e."""
    prefill = msgspec.structs.replace(DESCRIPTION, role="prefill", kv_transfer_address="127.0.0.1:2")
    decode = msgspec.structs.replace(DESCRIPTION, role="decode")
    roles = {"p": prefill, "q": prefill, "d": decode, "e": decode}
    fleet = Directed(*(stub(f"unix:/{name}", description) for name, description in roles.items()))
    fleet.direct({f"unix:/{name}": one for name, one in traffic.items()})
    return fleet


async def workers_of(fleet: Directed, conversation: int) -> str:
    """The names of the prefill and the decode worker of a conversation with several tokens to answer."""
    prompt = turn(conversation)
    longer = replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, max_tokens=9))
    async with fleet.dispatcher.place("m", longer) as placement:
        return "".join(worker.url[-1] for worker in placement.workers)


async def test_a_decode_worker_that_is_cordoned_gets_no_second_leg() -> None:
    fleet = pairs(d=CORDONED, p=CORDONED)
    assert {await workers_of(fleet, one) for one in range(20)} == {"qe"}


async def test_a_prefill_and_a_decode_worker_of_equal_shares_serve_the_same_conversations() -> None:
    fleet = pairs(q=WorkerTraffic(share=0.5), e=WorkerTraffic(share=0.5))
    assert {await workers_of(fleet, one) for one in range(40)} == {"pd", "qe"}


@table("policy", ["auto", "round_robin"])
async def test_a_canary_gets_its_share_of_2000_conversations(policy: Policy) -> None:
    counts = await Directed(policy=policy, c=CANARY).counts(2000)
    assert 160 <= counts["c"] <= 240


async def test_a_conversation_stays_on_its_side_at_any_gateway() -> None:
    first, other = Directed(c=CANARY), Directed(c=CANARY, policy="round_robin")
    drawn = set()
    for conversation in range(200):
        of_turns = {await first.worker_of(turn(conversation, number)) == "c" for number in range(5)}
        of_turns |= {await other.worker_of(turn(conversation, number)) == "c" for number in range(5)}
        assert len(of_turns) == 1
        drawn |= of_turns
    assert drawn == {False, True}


async def test_a_larger_share_takes_no_conversation_from_the_canary() -> None:
    fleet = Directed(c=CANARY)
    before = {one for one in range(300) if await fleet.worker_of(turn(one)) == "c"}
    fleet.direct({"c": WorkerTraffic(share=0.2)})
    after = {one for one in range(300) if await fleet.worker_of(turn(one)) == "c"}
    assert before < after


async def test_plain_prompts_are_drawn_by_their_beginning() -> None:
    fleet = Directed(c=CANARY)
    random, drawn = Random(0), 0
    for _ in range(200):
        beginning = [random.randrange(1000) for _ in range(256)]
        sides = {await fleet.worker_of(Prompt([*beginning, *[7] * more])) == "c" for more in (0, 40, 400)}
        assert len(sides) == 1
        drawn += sides.pop()
    assert 8 <= drawn <= 36


async def test_canaries_have_their_shares_together() -> None:
    counts = await Directed(b=CANARY, c=CANARY).counts(2000)
    assert 350 <= counts["b"] + counts["c"] <= 450


async def test_a_side_without_a_worker_leaves_its_conversations_to_the_other() -> None:
    fleet = Directed(c=CANARY)
    fleet.change("c", ready=False)
    assert set(await fleet.counts(50)) <= {"a", "b"}
    fleet.change("c", ready=True)
    fleet.change("a", ready=False)
    fleet.change("b", ready=False)
    assert set(await fleet.counts(50)) == {"c"}


async def test_a_spare_with_a_share_of_nothing_serves_when_all_others_are_gone() -> None:
    fleet = Directed(c=WorkerTraffic(share=0.0), b=CORDONED)
    assert set(await fleet.counts(50)) == {"a"}
    fleet.direct({"a": CORDONED, "b": CORDONED, "c": WorkerTraffic(share=0.0)})
    assert set(await fleet.counts(50)) == {"c"}


async def test_conversations_of_a_busy_canary_wait_and_keep_nobody_else_waiting() -> None:
    fleet = Directed(c=WorkerTraffic(share=0.5), limits=DispatchLimits(worker_queue=0))
    canary = [one for one in range(50) if await fleet.worker_of(turn(one)) == "c"]
    others = [one for one in range(50) if one not in canary]
    async with fleet.dispatcher.place("m", turn(canary[0])) as placement:
        assert placement.worker.url == "c"
        waiting = asyncio.create_task(fleet.worker_of(turn(canary[1])))
        await until(lambda: fleet.dispatcher.num_waiting == 1)
        assert await fleet.worker_of(turn(others[0])) != "c"
        assert not waiting.done()
    assert await waiting == "c"


@table(("policy", "low", "high"), [("round_robin", 1000, 1000), ("consistent_hash", 930, 1070)])
async def test_a_worker_gets_requests_by_its_weight(policy: Policy, low: int, high: int) -> None:
    fleet = Directed(policy=policy, a=WorkerTraffic(weight=2.0))
    random = Random(0)
    prompts = [Prompt([random.randrange(1000) for _ in range(20)]) for _ in range(2000)]
    counts = Counter([await fleet.worker_of(prompt) for prompt in prompts])
    assert low <= counts["a"] <= high


@table("policy", ["cost", "least_load", "power_of_two"])
async def test_a_worker_has_requests_by_its_weight(policy: Policy) -> None:
    """Of those that are in flight."""
    fleet = Directed(policy=policy, a=WorkerTraffic(weight=2.0), limits=DispatchLimits(worker_queue=1000))
    random = Random(0)
    places = [fleet.dispatcher.place("m", Prompt([random.randrange(1000) for _ in range(20)])) for _ in range(400)]
    for place in places:
        await place.__aenter__()
    assert 190 <= fleet.dispatcher.num_requests_at("a") <= 210
    for place in places:
        await place.__aexit__(None, None, None)
