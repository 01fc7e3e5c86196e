"""Addresses of servers with data-parallel ranks."""

import pytest
from tables import table

from saccade.connectors.rank_urls import MAX_RANKS, RankUrl


def test_server_without_ranks() -> None:
    assert RankUrl.read("vllms://h:1/") == RankUrl("vllms://h:1")
    assert RankUrl.read("vllm://h:1").of_ranks == ()


def test_every_rank_has_an_address() -> None:
    ranks = RankUrl.read("vllm://[::1]:8?ranks=2").of_ranks
    assert ranks == ("vllm://[::1]:8?rank=0", "vllm://[::1]:8?rank=1")
    assert [RankUrl.read(url).rank for url in ranks] == [0, 1]


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
