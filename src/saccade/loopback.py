"""Says which hosts are this machine."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach *host*: `localhost`, or an IP address with or without brackets."""
    if host.lower() == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def binds_to_loopback(bind: str) -> bool:
    """Return whether only this machine can reach `host:port`."""
    return is_loopback(bind.rpartition(":")[0])
