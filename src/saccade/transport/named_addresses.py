"""Restricts the addresses that a worker may name, based on the address that the operator gave for the worker.

Otherwise a worker could make its gateway, or another worker, connect to any service within their reach. Examples are a
container daemon's socket, and the credentials that a cloud serves at a link-local address.
"""

import ipaddress
from urllib.parse import urlsplit

from saccade.loopback import is_loopback
from saccade.whole_numbers import read_port

WILDCARDS = ("*", "[::]", "::", "0.0.0.0")  # noqa: S104 - read, not bound


def on_host_of_worker(endpoint: str, host: str) -> str | None:
    """Return the `tcp://host:port` that *endpoint* means for a worker on *host*, or None if that is on another host.

    A wildcard stands for every address of the worker's host. All loopback names count as one host.
    """
    scheme, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    if scheme != "tcp" or read_port(port) is None:
        return None
    own = f"[{host}]" if ":" in host else host
    if name in WILDCARDS or _are_one_host(name, own):
        return f"tcp://{own if name in WILDCARDS else name}:{port}"
    return None


def may_be_of_worker(address: str, url: str) -> bool:
    """Return whether the worker at *url* may claim that others reach it at *address*, `host:port`.

    The host in *url* is allowed. So is any other IP address, since the worker may have a separate network for
    transfers. But a loopback address is allowed only for a worker on loopback or on a Unix socket. A link-local
    address, or one that is not a single machine's, is allowed only if *url* has it.
    """
    name, _, port = address.rpartition(":")
    host = "localhost" if url.startswith("unix:") else urlsplit(url).hostname or ""
    if read_port(port) is None:
        return False
    name = name.strip("[]").lower()
    if _are_one_host(name, host):
        return True
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved)


def _are_one_host(name: str, other: str) -> bool:
    return name.lower() == other.lower() or (is_loopback(name) and is_loopback(other))
