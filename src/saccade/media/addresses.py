"""Checks the address of every connection that fetches an image, at the moment its socket is created.

An earlier check, of a name or of a resolver's answer, can be outdated by the time the connection is made. A socket is
created for the very address that it will connect to, whichever URL, redirect or DNS answer led there.
"""

import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

from saccade.errors import QueueFull, StartupError
from saccade.media.refusals import Refusals

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PUBLIC_PORTS = frozenset({80, 443})

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of the operating system if this process or the machine has too many open sockets."""

# The IANA IPv4 Special-Purpose Address Registry (RFC 6890), multicast (RFC 5771), the former 6to4 relays (RFC 7526).
_SPECIAL_IPV4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
    "168.63.129.16/32",  # a public address that is the platform's own service inside an Azure machine
)
# Only 2000::/3 is assigned as global unicast (RFC 4291); mapped, NAT64, link-local, unique local and multicast
# addresses are outside. These parts of it are special: protocol assignments with Teredo, documentation, 6to4.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_IPV6 = ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
_SPECIAL = tuple(ipaddress.ip_network(network) for network in (*_SPECIAL_IPV4, *_SPECIAL_IPV6))


def is_public(address: Address) -> bool:
    """Return whether *address* is public, and does not lead elsewhere through address translation or a tunnel."""
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_IPV6:
        return False
    return not any(address in network for network in _SPECIAL)


def parse_networks(networks: Iterable[str]) -> tuple[Network, ...]:
    """Parse CIDR *networks*, such as `10.1.0.0/16`. Raises StartupError for a malformed one."""
    try:
        return tuple(ipaddress.ip_network(network) for network in networks)
    except ValueError as error:
        raise StartupError(
            f"--allowed-media-networks must be networks such as 10.1.0.0/16 or fd00:1::/64: {error}."
        ) from error


class SocketGuard:
    """Creates a connector's sockets, but only for allowed addresses.

    Public hosts are allowed on ports 80 and 443, and hosts in *allowed_networks* on every port. *num_refused* counts
    refused connections; *refusals* logs them.
    """

    def __init__(self, allowed_networks: Iterable[str] = (), refusals: Refusals | None = None) -> None:
        self._allowed = parse_networks(allowed_networks)
        self._refusals = refusals or Refusals()
        self.num_refused = 0

    def allows(self, host: str, port: int) -> bool:
        """Return whether connections to *port* of *host*, an address as the operating system prints it, are allowed."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        # The kernel connects to a mapped address over IPv4, so check that one.
        address = getattr(address, "ipv4_mapped", None) or address
        if getattr(address, "scope_id", None) is not None:
            return False
        if any(address in network for network in self._allowed):
            return True
        return port in PUBLIC_PORTS and is_public(address)

    def open_socket(self, address: tuple[Any, Any, int, str, tuple[Any, ...]]) -> socket.socket:
        """Return a socket for *address*, one of the tuples that getaddrinfo() returns.

        An aiohttp connector uses this as its `socket_factory`, and calls it before every connection. Raises
        PermissionError if the address is not allowed, and the errors of new_socket().
        """
        family, kind, protocol, _, target = address
        if family not in (socket.AF_INET, socket.AF_INET6) or not self.allows(target[0], target[1]):
            self.num_refused += 1
            self._refusals.note("the address is private, or its port is not 80 or 443", "--allowed-media-networks")
            raise PermissionError("The address is not allowed.")
        return new_socket(family, kind, protocol)


def new_socket(family: int, kind: int, protocol: int = 0) -> socket.socket:
    """Return a socket. Raises OSError, and QueueFull if this process or the machine has none left."""
    try:
        return socket.socket(family, kind, protocol)
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise QueueFull("Too many connections are open; try again later.") from None
        raise
