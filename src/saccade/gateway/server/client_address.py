"""Finds the address of a request's client, which trusted proxies may forward."""

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache

from starlette.types import Scope

from saccade.errors import StartupError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

IPV6_PREFIX = 64
"""Bits of an IPv6 address that a client cannot choose freely."""

MAX_FORWARDED = 32
"""Only so much of X-Forwarded-For is read, from the right."""


@lru_cache(maxsize=1024)
def client_key(host: str) -> str:
    """Return the key that identifies a client by its address *host*; for IPv6, the /64 network."""
    address = _parse(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address), IPV6_PREFIX), strict=False))
    return host if address is None else str(address)


class TrustedProxies:
    """The proxies whose X-Forwarded-For is used; *networks* are CIDRs. Raises StartupError if one is malformed."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        try:
            self._networks = tuple(ipaddress.ip_network(network) for network in networks)
        except ValueError as error:
            raise StartupError("--trusted-proxies takes networks such as 10.1.0.0/16 or fd00:1::/64.") from error

    def is_trusted(self, host: str) -> bool:
        """Return whether *host*, an address, is one of the proxies."""
        address = _parse(host) if self._networks else None
        return address is not None and any(address in network for network in self._networks)

    def client_of(self, scope: Scope) -> str:
        """Return a request's client.

        That is its peer or, if the peer is a proxy, the rightmost forwarded address that is not a proxy.
        """
        peer = scope.get("client")
        host = peer[0] if peer else ""
        if not self.is_trusted(host):
            return client_key(host)
        for forwarded in reversed(_forwarded(scope["headers"])):
            if _parse(forwarded) is None:
                break
            host = forwarded
            if not self.is_trusted(forwarded):
                break
        return client_key(host)


def _forwarded(headers: Sequence[tuple[bytes, bytes]]) -> list[str]:
    values = [value.decode("latin-1") for name, value in headers if name == b"x-forwarded-for"]
    return [one.strip() for one in ",".join(values).rsplit(",", MAX_FORWARDED)[-MAX_FORWARDED:]]


def _parse(host: str) -> Address | None:
    """Return *host* as an address, or None if it is not one; an IPv4 address mapped into IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
