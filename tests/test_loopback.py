"""Which hosts only this machine can reach."""

import pytest

from saccade.loopback import binds_to_loopback, is_loopback


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost", "127.0.0.1", "127.8.9.1", "::1", "[::1]", "::ffff:127.0.0.1"]
)
def test_loopback_hosts(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example.org"])
def test_other_hosts(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("bind", "expected"), [("127.0.0.1:1", True), ("[::1]:1", True), ("[::]:1", False), (":1", False)]
)
def test_binds(bind: str, *, expected: bool) -> None:
    assert binds_to_loopback(bind) is expected
