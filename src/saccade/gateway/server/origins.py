"""Who sends a request: its client, which proxies may forward, and checks of Host and Origin for servers without keys.

Any page in a browser on the same machine can send requests to a server on localhost; the browser adds the page's origin
in the header Origin. A page can also point its own name at 127.0.0.1 (DNS rebinding). Its requests then have the
server's origin, but the page's name in the header Host.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from starlette.types import Scope

from saccade.errors import HostNotAllowed, OriginNotAllowed, StartupError, UnsupportedMediaType

Headers = Sequence[tuple[bytes, bytes]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

IPV6_PREFIX = 64
"""Bits of an IPv6 address that a client cannot choose freely."""

MAX_FORWARDED = 32
"""Only so much of X-Forwarded-For is read, from the right."""

OWN_NAMES = frozenset({"localhost", "host.docker.internal"})
ANY = "*"
JSON = b"application/json"

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::[0-9]{1,5})?", re.IGNORECASE)
_PORT = re.compile(r":[0-9]{1,5}$")

HOST_REFUSED = (
    "This server has no API key, so it accepts only localhost, IP addresses and the names of `--allowed-hosts`. "
    "Use one of those, or start the server with `--allowed-hosts NAME` or with `--api-key KEY`."
)
ORIGIN_REFUSED = (
    "This server has no API key, so web pages may call it only from allowed origins. Start it with "
    "`--allowed-origins ORIGIN`."
)
NO_ORIGINS = (
    "Web pages may not call this server: no origin is allowed. Start it with `--allowed-origins ORIGIN`, as in "
    "`--allowed-origins https://chat.example`."
)
NOT_JSON = "Content-Type must be application/json. With curl: -H 'Content-Type: application/json'."


class AllowedOrigins:
    """Checks Host and Origin of requests.

    *allowed_origins* are origins as browsers write them, or `*` for all. *allowed_hosts* are names, `*.suffix`, or `*`
    for every name. Only a *keyless* server checks Host and Origin: a page does not know a key.
    """

    def __init__(self, allowed_origins: Collection[str], allowed_hosts: Collection[str], *, keyless: bool) -> None:
        self._keyless = keyless
        self._any_origin = ANY in allowed_origins
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        hosts = {_PORT.sub("", host).lower().rstrip(".") for host in allowed_hosts}
        self._any_host = ANY in hosts
        self._names = OWN_NAMES | hosts
        # Clients repeat the same name; the bound keeps arbitrary names from filling the memory.
        self._is_own = lru_cache(maxsize=256)(self._reads_as_own)
        self._suffixes = (".localhost", *(host[1:] for host in hosts if host.startswith("*.")))

    def check(self, method: str, headers: Headers) -> None:
        """Raise HostNotAllowed or OriginNotAllowed if a page without permission may have sent the request."""
        origins = _values(headers, b"origin")
        if origins and method == "OPTIONS" and not self._origins:
            raise OriginNotAllowed(NO_ORIGINS)
        if not self._keyless:
            return
        hosts = _values(headers, b"host")
        # Browsers always send one; probes over HTTP/1.0 send none.
        if len(hosts) > 1 or (hosts and not self._is_own(hosts[0])):
            raise HostNotAllowed(HOST_REFUSED)
        if origins and not self._is_allowed(origins, hosts):
            raise OriginNotAllowed(ORIGIN_REFUSED)

    def _reads_as_own(self, host: bytes) -> bool:
        """Whether *host* is an IP address, a name of this machine, or an allowed name."""
        match = _HOST.fullmatch(host.decode("latin-1"))
        if match is None:
            return False
        if self._any_host:
            return True
        name = (match["ipv6"] or match["name"]).lower().rstrip(".")
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)

    def _is_allowed(self, origins: Sequence[bytes], hosts: Sequence[bytes]) -> bool:
        if len(origins) > 1:
            return False
        if self._any_origin:
            return True
        # "null" is the origin of every sandboxed frame and local file, so it identifies nothing.
        if origins[0].lower() == b"null":
            return False
        _, separator, place = origins[0].partition(b"://")
        is_same = bool(separator) and [place.lower()] == [host.lower() for host in hosts]
        return is_same or origins[0] in self._origins


def check_json(headers: Headers) -> None:
    """Raise UnsupportedMediaType unless Content-Type is JSON, which a page may not send without a preflight."""
    types = _values(headers, b"content-type")
    if len(types) != 1 or types[0].partition(b";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(NOT_JSON)


def _values(headers: Headers, header: bytes) -> list[bytes]:
    return [value for name, value in headers if name == header]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1024)
def client_key(host: str) -> str:
    """Return the client of *host*, an address: for IPv6 its /64 network."""
    address = _parse(host)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address), IPV6_PREFIX), strict=False))
    return host if address is None else str(address)


class TrustedProxies:
    """The proxies whose X-Forwarded-For is used; *networks* are CIDRs. Raises StartupError."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        try:
            self._networks = tuple(ipaddress.ip_network(network) for network in networks)
        except ValueError as error:
            raise StartupError("--trusted-proxies takes networks such as 10.1.0.0/16 or fd00:1::/64.") from error

    def is_trusted(self, host: str) -> bool:
        """Whether *host*, an address, is one of the proxies."""
        address = _parse(host) if self._networks else None
        return address is not None and any(address in network for network in self._networks)

    def client_of(self, scope: Scope) -> str:
        """Return a request's client: its peer or, if that is a proxy, the rightmost forwarded address that is not."""
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
    """Return *host* as an address; an IPv4 address mapped into IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
