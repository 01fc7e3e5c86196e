"""Items are kept for their tenant, for their time, and within the quotas, on both databases."""

import asyncio
import secrets
from collections import defaultdict
from typing import Any

import databases
import hypothesis
import pytest
from databases import PLENTY, Clock, item, opened
from hypothesis import strategies as st

from saccade.errors import InternalError
from saccade.gateway.state.connection import Connection, Server
from saccade.gateway.state.items import MAX_CHAIN, ROW_BYTES, Items
from saccade.gateway.state.room import BATCH, Quotas
from saccade.gateway.state.rows import FILE, RESPONSE

TENANTS = (b"", b"one", b"two")
IDS = ("a", "b", "c", "ab")


async def held(items: Items) -> dict[tuple[bytes, int], tuple[int, int]]:
    """What the counts say, which must be what there is."""

    def read(connection: Connection) -> dict[tuple[bytes, int], tuple[int, int]]:
        counted = connection.rows(
            tuple[bytes, int, int, int], "select tenant, kind, items, bytes from holding where items <> 0"
        )
        there: dict[tuple[bytes, int], list[int]] = defaultdict(lambda: [0, 0])
        for tenant, kind, size in connection.rows(tuple[bytes, int, int], "select tenant, kind, bytes from item"):
            there[tenant, kind][0] += 1
            there[tenant, kind][1] += size
        counts = {(tenant, kind): (number, size) for tenant, kind, number, size in counted}
        assert counts == {place: tuple(count) for place, count in there.items()}
        return counts

    return await items.database.read(read)


async def test_an_item_is_found_listed_and_deleted(server: Server) -> None:  # F20
    async with opened(server) as items:
        assert await items.put(b"t", FILE, item("a", b"first"))
        assert await items.put(b"t", FILE, item("b", b""))
        assert await items.find(b"t", FILE, "a") == (b"head of a", b"first")
        assert await items.head(b"t", FILE, "b") == b"head of b"
        assert await items.find(b"t", RESPONSE, "a") is None
        # Stored again, an item is the newest.
        assert await items.put(b"t", FILE, item("a", b"second"))
        assert await items.heads(b"t", FILE) == [b"head of b", b"head of a"]
        assert (await items.find(b"t", FILE, "a") or ())[1] == b"second"
        assert await items.delete(b"t", FILE, "a")
        assert not await items.delete(b"t", FILE, "a")
        assert await items.find(b"t", FILE, "a") is None
        assert set((await held(items)).values()) == {(1, len(b"head of b") + ROW_BYTES)}


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_items_outlive_the_gateway(is_encrypted: bool, server: Server) -> None:  # F20
    body = bytes(range(256)) * 5000
    async with opened(server, is_encrypted=is_encrypted) as items:
        await items.put(b"t", FILE, item("a", body))
    async with opened(server, is_encrypted=is_encrypted) as items:
        assert await items.find(b"t", FILE, "a") == (b"head of a", body)


async def test_an_item_is_there_until_it_expires(server: Server) -> None:
    clock = Clock()
    async with opened(server, clock=clock) as items:
        for number in range(BATCH + 2):
            await items.put(b"t", FILE, item(str(number), seconds=100))
        await items.put(b"t", FILE, item("long", seconds=1000))
        clock.pass_seconds(90)
        assert await items.head(b"t", FILE, "0")
        clock.pass_seconds(10)
        assert await items.head(b"t", FILE, "0") is None
        assert not await items.delete(b"t", FILE, "0")
        assert await items.heads(b"t", FILE) == [b"head of long"]
        await items.sweep()
        assert [number for number, _ in (await held(items)).values()] == [1]


async def test_a_chain_goes_back_to_its_beginning(server: Server) -> None:
    async with opened(server) as items:
        previous = None
        for name in "abcd":
            await items.put(b"t", RESPONSE, item(name, name.encode(), previous=previous))
            previous = name
        await items.put(b"t", RESPONSE, item("e", b"e", previous="b"))
        chain = await items.chain(b"t", RESPONSE, "d", 1 << 20)
        assert (chain.bodies, chain.is_whole, chain.is_long) == ([b"d", b"c", b"b", b"a"], True, False)
        assert (await items.chain(b"t", RESPONSE, "e", 1 << 20)).bodies == [b"e", b"b", b"a"]
        assert not (await items.chain(b"u", RESPONSE, "d", 1 << 20)).bodies
        await items.delete(b"t", RESPONSE, "a")
        assert not (await items.chain(b"t", RESPONSE, "d", 1 << 20)).is_whole


async def test_a_chain_is_read_up_to_a_limit(server: Server) -> None:
    async with opened(server) as items:
        previous = None
        for number in range(5):
            await items.put(b"t", RESPONSE, item(str(number), bytes(10_000), previous=previous))
            previous = str(number)
        assert not (await items.chain(b"t", RESPONSE, "4", 60_000)).is_long
        long = await items.chain(b"t", RESPONSE, "4", 25_000)
        assert long.is_long
        assert len(long.bodies) == 3


async def test_a_chain_of_too_many_items_is_long(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    assert MAX_CHAIN == 2048
    monkeypatch.setattr("saccade.gateway.state.items.MAX_CHAIN", 4)
    async with opened(server) as items:
        previous = None
        for number in range(5):
            await items.put(b"t", RESPONSE, item(str(number), previous=previous))
            previous = str(number)
        assert (await items.chain(b"t", RESPONSE, "4", 1 << 20)).is_long
        assert not (await items.chain(b"t", RESPONSE, "3", 1 << 20)).is_long


async def test_a_continued_chain_is_kept_for_longer(server: Server) -> None:
    """A conversation does not lose its beginning while it goes on."""
    clock = Clock()
    async with opened(server, clock=clock) as items:
        await items.put(b"t", RESPONSE, item("a", seconds=100))
        clock.pass_seconds(90)
        await items.put(b"t", RESPONSE, item("b", seconds=190, previous="a"))
        clock.pass_seconds(90)
        assert len((await items.chain(b"t", RESPONSE, "b", 1 << 20)).bodies) == 2


async def test_the_tenant_with_the_most_bytes_loses_what_it_used_longest_ago(server: Server) -> None:
    one = item("x", bytes(1000)).num_bytes
    async with opened(server, Quotas(4 * one, 6 * one, 100)) as items:
        for name in "abcd":
            assert await items.put(b"large", FILE, item(name, bytes(1000)))
        for name in "xyz":
            assert await items.put(b"small", FILE, item(name, bytes(1000)))
        assert await items.heads(b"large", FILE) == [b"head of b", b"head of c", b"head of d"]
        assert len(await items.heads(b"small", FILE)) == 3
        await held(items)


async def test_a_tenant_over_its_quota_loses_its_own(server: Server) -> None:
    one = item("x", bytes(1000)).num_bytes
    async with opened(server, Quotas(2 * one, 100 * one, 100)) as items:
        await items.put(b"other", FILE, item("o", bytes(1000)))
        await items.put(b"t", RESPONSE, item("a", bytes(1000)))
        for name in "bc":
            assert await items.put(b"t", FILE, item(name, bytes(1000)))
        assert await items.head(b"t", RESPONSE, "a") is None
        assert await items.heads(b"t", FILE) == [b"head of b", b"head of c"]
        assert await items.heads(b"other", FILE) == [b"head of o"]
        assert not await items.put(b"t", FILE, item("large", bytes(2 * one)))
        assert len(await items.heads(b"t", FILE)) == 2


async def test_a_tenant_has_a_bounded_number_of_files(server: Server) -> None:
    async with opened(server, Quotas(1 << 30, 1 << 30, 3)) as items:
        for number in range(5):
            assert await items.put(b"t", FILE, item(str(number)))
            assert await items.put(b"t", RESPONSE, item(str(number)))
        assert await items.heads(b"t", FILE) == [b"head of 2", b"head of 3", b"head of 4"]
        assert len(await items.heads(b"t", RESPONSE)) == 5


async def test_writers_do_not_lose_each_others_items(server: Server) -> None:
    """Two gateways store, continue and delete at the same time, for the same tenants."""
    one = item("x", bytes(100)).num_bytes
    quotas = Quotas(20 * one, 30 * one, 100)
    async with opened(server, quotas) as first, opened(server, quotas) as second:

        async def write(items: Items, tenant: bytes, number: int) -> None:
            name, previous = f"{number}", f"{number - 1}" if number % 5 else None
            await items.put(tenant, RESPONSE, item(name, bytes(100), previous=previous))
            if number % 7 == 0:
                await items.delete(tenant, RESPONSE, name)

        both = [(items, tenant) for items in (first, second) for tenant in (b"t", b"u")]
        await asyncio.gather(*(write(*place, number) for number in range(30) for place in both))
        counts = await held(first)
        assert sum(size for _, size in counts.values()) <= quotas.all_bytes


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete"]),
        st.sampled_from(TENANTS),
        st.sampled_from([FILE, RESPONSE]),
        st.sampled_from(IDS),
        st.binary(max_size=20),
        st.sampled_from([None, *IDS]),
        st.booleans(),
    ),
    max_size=12,
)
"""What a gateway does, for whom, with which item, its body and what it continues, and whether it is the first gateway."""


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_no_tenant_finds_anothers_items(is_encrypted: bool, server: Server) -> None:  # F11, F20
    """Over any order of writes by two gateways, each tenant finds exactly its own."""

    async def check(steps: list[Any]) -> None:
        async with opened(server, is_encrypted=is_encrypted) as one, opened(server, is_encrypted=is_encrypted) as two:
            run = secrets.token_bytes(8)
            known: dict[tuple[bytes, int, str], bytes] = {}
            for name, of_run, kind, known_as, body, previous, is_first in steps:
                items, tenant = (one if is_first else two), run + of_run
                if name == "put":
                    assert await items.put(tenant, kind, item(known_as, body, previous=previous))
                    known[tenant, kind, known_as] = body
                else:
                    was_there = known.pop((tenant, kind, known_as), None) is not None
                    assert await items.delete(tenant, kind, known_as) == was_there
            for tenant in [run + of_run for of_run in TENANTS]:
                for kind in (FILE, RESPONSE):
                    own = {known_as: body for (*place, known_as), body in known.items() if place == [tenant, kind]}
                    for known_as in IDS:
                        found = await two.find(tenant, kind, known_as)
                        assert (found and found[1]) == own.get(known_as)
                        chain = await one.chain(tenant, kind, known_as, 1 << 20)
                        assert {*chain.bodies} <= {*own.values()}
                    assert len(await one.heads(tenant, kind)) == len(own)
            await held(one)

    @hypothesis.settings(max_examples=10, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(STEPS)
    def run(steps: list[Any]) -> None:
        asyncio.run(check(steps))

    run()


async def test_an_encrypted_content_opens_only_at_its_place(server: Server) -> None:
    """Rows show neither tenants nor ids nor contents, and a row that is moved does not open."""
    async with opened(server, is_encrypted=True) as items:
        await items.put(b"tenant", FILE, item("a known id", b"a content"))
        await items.put(b"other", FILE, item("b", b"of another"))

        def read(connection: Connection) -> list[bytes]:
            found = connection.rows(tuple[bytes, bytes, bytes, bytes], "select tenant, id, head, body from item")
            return [value for row in found for value in row]

        values = b"".join(await items.database.read(read))
        assert not any(words in values for words in (b"tenant", b"known", b"head of", b"content"))
        place, from_place = (
            databases.KEYS.item(*one) for one in ((b"tenant", FILE, "a known id"), (b"other", FILE, "b"))
        )
        await items.database.write(
            lambda connection: connection.execute(
                "update item set body = (select body from item where id = ?) where id = ?", from_place, place
            )
        )
        with pytest.raises(InternalError):
            await items.find(b"tenant", FILE, "a known id")
        assert await items.head(b"tenant", FILE, "a known id") == b"head of a known id"
        assert PLENTY.largest_item == 1 << 30
