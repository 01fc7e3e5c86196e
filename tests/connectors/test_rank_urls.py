"""Addresses of servers with data-parallel ranks."""

import pytest
from tables import table

from saccade.connectors.rank_urls import MAX_RANKS, RankedAddresses, RankUrl

ADDRESSES = RankedAddresses("A", "a://")


def test_server_without_ranks() -> None:
    assert RankUrl.read("vllms://h:1/") == RankUrl("vllms://h:1")
    assert ADDRESSES.worker_urls("a://h:1") == ("a://h:1",)


def test_every_rank_has_an_address() -> None:
    ranks = ADDRESSES.worker_urls("a://[::1]:8?ranks=2")
    assert ranks == ("a://[::1]:8?rank=0", "a://[::1]:8?rank=1")
    assert [ADDRESSES.read_worker(url).rank for url in ranks] == [0, 1]


@table(
    "url",
    [
        "a://h",
        "a://:1",
        "a://h:1/x",
        "a://h:1#x",
        "a://u@h:1",
        "a://h:1?rank=",
        "a://h:1?rank=-1",
        "a://h:1?ranks=0",
        f"a://h:1?ranks={MAX_RANKS + 1}",
        "a://h:1?ranks=2&rank=1",
        "a://h:1?rank=1&rank=2",
        "a://h:1?other=1",
        "a://h:99999999",
    ],
)
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=r"a://|ort"):
        RankUrl.read(url)
