"""No address that is not of the public internet passes, however it is written."""  # F6

import ipaddress
import resource
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from saccade.errors import QueueFull
from saccade.media.addresses import SocketGuard

PRIVATE_IPV4 = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32",
]  # fmt: skip
PRIVATE_IPV6 = [
    "::/96", "::1/128", "::ffff:127.0.0.0/104", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/32",
    "2001:2::/48", "2001:10::/28", "2001:20::/28", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7",
    "fd00:ec2::/32", "fe80::/10", "fec0::/10", "ff00::/8",
]  # fmt: skip

private_ipv4 = st.sampled_from(PRIVATE_IPV4).flatmap(lambda network: st.ip_addresses(network=network))
private_ipv6 = st.sampled_from(PRIVATE_IPV6).flatmap(lambda network: st.ip_addresses(network=network))


def _forms(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> set[str]:
    """Ways to write an address that a socket could be made for, and those that hide another in it."""
    forms = {str(address), address.exploded, str(address).upper()}
    if isinstance(address, ipaddress.IPv4Address):
        number = int(address)
        forms |= {f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}", f"::ffff:0:{address}"}
        forms |= {f"2002:{number >> 16:x}:{number & 0xFFFF:x}::", f"2001:0:{number >> 16:x}:{number & 0xFFFF:x}::"}
        forms |= {str(number), hex(number), oct(number), f"0{address}"}
    else:
        forms |= {f"{address}%1", f"{address}%lo"}
    return forms


@given(private_ipv4 | private_ipv6, st.sampled_from([80, 443]))
def test_private_address_is_refused_in_every_form(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    guard = SocketGuard()
    assert [form for form in _forms(address) if guard.allows(form, port)] == []


@given(st.ip_addresses())
def test_allowed_addresses_are_global_in_the_standard_library_too(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    assert address.is_global or not SocketGuard().allows(str(address), 443)


@table(
    "host",
    ["1.1.1.1", "172.15.255.255", "172.32.0.0", "223.255.255.255", "::ffff:1.1.1.1", "2606:4700::1111", "2a00:1450::1"],
)
def test_public_address_is_allowed_on_web_ports_only(host: str) -> None:
    guard = SocketGuard()
    assert [port for port in (0, 22, 80, 443, 6379, 8080) if guard.allows(host, port)] == [80, 443]


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254"]
)
def test_metadata_services_are_refused(host: str) -> None:
    assert not SocketGuard().allows(host, 80)


@table(
    ("host", "is_allowed"),
    [("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("10.2.0.1", False), ("fd00:1::5", True), ("fd00:2::5", False), ("fd00:1::5%lo", False)],
)  # fmt: skip
def test_allowed_networks_open_every_port_of_theirs(host: str, is_allowed: bool) -> None:
    guard = SocketGuard(["10.1.0.0/16", "fd00:1::/64"])
    assert guard.allows(host, 80) == guard.allows(host, 6379) == is_allowed


@pytest.mark.parametrize(
    ("family", "target"),
    [(socket.AF_UNIX, ("/run/socket", 80)), (socket.AF_INET, ("127.0.0.1", 80)), (socket.AF_INET6, ("::1", 80, 0, 0))],
)
def test_no_socket_is_made_for_a_refused_address(family: socket.AddressFamily, target: tuple[object, ...]) -> None:
    guard = SocketGuard()
    with pytest.raises(PermissionError):
        guard.open_socket((family, socket.SOCK_STREAM, 0, "", target))
    assert guard.num_refused == 1


def test_process_without_sockets_reports_busy() -> None:
    """It is no fault of the image's server."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(QueueFull):
            SocketGuard().open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("1.1.1.1", 80)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
