"""The directory of a fleet on Ray: entries, leases, and what a new one says."""

import itertools

from saccade.supervisor.ray_directory import LEASE_SECONDS, Directory, Listing

A, B, P = "grpc://10.0.0.1:4000", "grpc://10.0.0.2:4000", "grpc://10.0.0.3:4000"


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_an_entry_lasts_as_long_as_its_lease() -> None:  # F11
    clock = Clock()
    directory = Directory(now=clock)
    await directory.renew("both", A)
    clock.seconds = LEASE_SECONDS - 1
    await directory.renew("both", B)
    await directory.renew("prefill", P)
    assert await directory.list_workers() == Listing({"both": (A, B), "prefill": (P,)}, complete=False)
    clock.seconds = LEASE_SECONDS
    assert await directory.list_workers() == Listing({"both": (B,), "prefill": (P,)}, complete=True)


async def test_a_worker_that_leaves_is_not_listed_and_may_come_back() -> None:
    directory = Directory(now=Clock())
    for url in (A, B):
        await directory.renew("decode", url)
    await directory.leave(A)
    await directory.leave("grpc://10.0.0.9:1")
    assert (await directory.list_workers()).urls == {"decode": (B,)}
    await directory.renew("decode", A)
    assert (await directory.list_workers()).urls == {"decode": (B, A)}


async def test_a_directory_is_complete_once_every_replica_has_had_the_time_to_renew() -> None:
    clock = Clock()
    directory = Directory(now=clock)
    said = []
    for seconds in itertools.takewhile(lambda second: second <= 2 * LEASE_SECONDS, itertools.count(0.0, 5.0)):
        clock.seconds = seconds
        said.append((await directory.list_workers()).complete)
    assert said == [False] * 3 + [True] * 4
