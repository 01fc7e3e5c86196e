"""Checks Host and Origin for servers without keys.

Any page in a browser on the same machine can send requests to a server on localhost. The browser puts the page's origin
into the header Origin. A page can also point its own name at 127.0.0.1 (DNS rebinding). Its requests are then
same-origin, but the header Host still has the page's name.
"""

import ipaddress
import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from saccade.errors import HostNotAllowed, OriginNotAllowed, UnsupportedMediaType

Headers = Sequence[tuple[bytes, bytes]]


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
    """Checks requests' Host and Origin.

    *allowed_origins* are origins as browsers write them, or `*` for all. *allowed_hosts* are names, `*.suffix`, or `*`
    for every name. A server that is not *keyless* checks only preflight requests, because a web page cannot send a key
    that it does not have.
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

    def check_request(self, method: str, headers: Headers) -> None:
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
        """Return whether *host* is an IP address, a name of this machine, or an allowed name."""
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
