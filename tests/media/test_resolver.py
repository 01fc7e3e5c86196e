"""Names are looked up on the event loop: a name server that never answers holds up its own fetch, and nothing after it."""  # F6

import asyncio
import os
import socket

import pytest
import uvloop
from name_server import AAAA, A, NameServer, naming
from web import IMAGE, fetching, serving

from saccade.errors import InvalidImageUrl, QueueFull
from saccade.media.image_url import NOT_FETCHED
from saccade.media.resolver import MAX_ADDRESSES

HERE = ("127.0.0.1/32",)


async def asked(server: NameServer, num_names: int) -> None:
    """Return once so many different names were asked for."""
    names: set[str] = set()
    while len(names) < num_names:
        names.add(await server.news.get())


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_other_hosts_are_fetched_while_lookups_hang() -> None:
    settings = {"allowed_networks": HERE, "max_concurrent": 25}
    async with serving() as web, naming() as (server, resolver), fetching(resolver, **settings) as fetcher:
        hung = [
            asyncio.create_task(fetcher.fetch(f"http://silent{index}.test:{web.port}/", client=b"slow"))
            for index in range(24)
        ]
        await asked(server, 24)
        assert (await fetcher.fetch(f"http://healthy.test:{web.port}/", client=b"innocent")).encoded == IMAGE
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)


async def test_hanging_lookups_release_their_turns_when_their_fetches_end() -> None:
    settings = {"allowed_networks": HERE, "max_concurrent": 4, "connect_timeout_seconds": 1.0}
    async with serving() as web, naming() as (server, resolver), fetching(resolver, **settings) as fetcher:
        hung = [
            asyncio.create_task(fetcher.fetch(f"http://silent{index}.test:{web.port}/", client=b"slow"))
            for index in range(8)
        ]
        await asked(server, 4)
        assert (await fetcher.fetch(f"http://healthy.test:{web.port}/", client=b"innocent")).encoded == IMAGE
        ends = await asyncio.gather(*hung, return_exceptions=True)
        assert {(type(end), str(end)) for end in ends} == {(InvalidImageUrl, NOT_FETCHED)}


async def test_request_without_a_free_turn_is_told_to_retry() -> None:
    settings = {"allowed_networks": HERE, "max_concurrent": 4, "turn_timeout_seconds": 0.1}
    async with serving() as web, naming() as (server, resolver), fetching(resolver, **settings) as fetcher:
        hung = [
            asyncio.create_task(fetcher.fetch(f"http://silent{index}.test:{web.port}/", client=b"slow"))
            for index in range(4)
        ]
        await asked(server, 4)
        with pytest.raises(QueueFull):
            await fetcher.fetch(f"http://healthy.test:{web.port}/", client=b"innocent")
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)


def test_lookup_that_is_cancelled_leaves_no_socket_and_no_task_on_either_loop() -> None:
    async def attempt() -> None:
        async with naming() as (server, resolver):
            before = num_open_files()
            lookups = [asyncio.create_task(resolver.resolve(f"silent{index}.test")) for index in range(8)]
            await asked(server, 8)
            assert num_open_files() > before
            for lookup in lookups:
                lookup.cancel()
            await asyncio.wait(lookups)
            assert num_open_files() == before
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert [address["host"] for address in await resolver.resolve("healthy.test")] == ["127.0.0.1"]
            assert num_open_files() == before

    asyncio.run(attempt())
    uvloop.run(attempt())


async def test_addresses_come_from_both_families_and_are_few() -> None:
    many = [b"\x7f\0\0" + bytes([last]) for last in range(1, 40)]
    async with naming({A: many, AAAA: [bytes(15) + b"\1"]}) as (_, resolver):
        found = await resolver.resolve("many.test", 80)
        assert [address["host"] for address in found[-2:]] == [f"127.0.0.{MAX_ADDRESSES}", "::1"]
        assert [address["family"] for address in found] == [socket.AF_INET] * MAX_ADDRESSES + [socket.AF_INET6]
        assert {address["port"] for address in found} == {80}
        assert [entry["host"] for entry in await resolver.resolve("many.test", 80, socket.AF_INET6)] == ["::1"]


async def test_nothing_is_kept_between_lookups() -> None:
    async with naming() as (server, resolver):
        await resolver.resolve("healthy.test")
        server.addresses = {A: [b"\x7f\0\0\2"]}
        assert [address["host"] for address in await resolver.resolve("healthy.test")] == ["127.0.0.2"]


@pytest.mark.parametrize("host", ["unknown.test", "a..test", "x" * 64 + ".test", "x." * 200 + "test"])
async def test_name_without_an_address_is_an_error_of_the_operating_system(host: str) -> None:
    async with naming() as (_, resolver):
        with pytest.raises(OSError, match="host"):
            await resolver.resolve(host)


async def test_name_that_has_no_record_is_an_error() -> None:
    async with naming({}) as (_, resolver):
        with pytest.raises(OSError, match="host"):
            await resolver.resolve("healthy.test")


async def test_name_of_the_hosts_file_needs_no_name_server() -> None:
    async with naming() as (server, resolver):
        found = {address["host"] for address in await resolver.resolve("localhost")}
        assert "127.0.0.1" in found
        assert server.asked == []
