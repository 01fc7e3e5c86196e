"""Whose request it is: an address counts as far as it can be trusted."""

from typing import Any

import pytest
from tables import table

from saccade.errors import StartupError
from saccade.gateway.server.client_address import TrustedProxies, client_key


def scope(peer: str | None, *forwarded: str) -> dict[str, Any]:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    return {"client": None if peer is None else (peer, 1), "headers": headers}


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("", ""),
    ],
)
def test_one_client_is_one_key(host: str, key: str) -> None:
    assert client_key(host) == key


@table(
    ("peer", "forwarded", "client"),
    [
        ("198.51.100.1", ["203.0.113.9"], "198.51.100.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6", "203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["nonsense, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["2001:db8::1"], "2001:db8::/64"),
        ("10.0.0.1", ["6.6.6.6," + " 10.0.0.2," * 100 + "10.0.0.3"], "10.0.0.2"),
        (None, ["203.0.113.9"], ""),
    ],
)
def test_the_rightmost_address_that_no_proxy_has_is_the_client(
    peer: str | None, forwarded: list[str], client: str
) -> None:
    assert TrustedProxies(["10.0.0.0/8"]).client_of(scope(peer, *forwarded)) == client


def test_nobody_is_trusted_by_default() -> None:
    assert TrustedProxies().client_of(scope("10.0.0.1", "203.0.113.9")) == "10.0.0.1"


def test_invalid_network_is_named() -> None:
    with pytest.raises(StartupError, match="--trusted-proxies"):
        TrustedProxies(["proxy.example.com"])
