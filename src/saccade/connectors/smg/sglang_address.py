"""Addresses of SGLang workers: one worker, or a prefill and a decode worker that serve together.

sglang://HOST:PORT                                  a worker that does both
sglang://DECODE:PORT?prefill=PREFILL:PORT           a pair; add &bootstrap=PORT if the worker does not report its own
sglang://PREFILL:PORT?role=prefill&bootstrap=PORT   one side of pairs: every decode worker of a fleet is paired
sglang://DECODE:PORT?role=decode                    with every prefill worker
"""

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from saccade.errors import StartupError
from saccade.transport import wire

SCHEME = "sglang://"
FORMS = (
    f"The address of an SGLang worker is {SCHEME}HOST:PORT; of a decode and a prefill worker together, "
    f"{SCHEME}HOST:PORT?prefill=HOST:PORT, with &bootstrap=PORT if need be; of one of them, "
    f"{SCHEME}HOST:PORT?role=prefill or ?role=decode"
)


@dataclass(frozen=True)
class SglangAddress:
    """A worker at *target*, `host:port`.

    *prefill* is the target of the prefill worker in its pair. *bootstrap* is the prefill worker's bootstrap port, or 0
    for the one that the prefill worker reports. *role* is "prefill", "decode" or "".
    """

    target: str
    prefill: str = ""
    bootstrap: int = 0
    role: str = ""

    @classmethod
    def read(cls, url: str) -> "SglangAddress":
        """Read *url*. Raises StartupError for any other form."""
        try:
            split = urlsplit(url)
            query = parse_qs(split.query, keep_blank_values=True, strict_parsing=bool(split.query), max_num_fields=4)
            options = {name: value for name, (value,) in query.items()}
            target = wire.target("grpc://" + split.netloc)
            prefill = wire.target("grpc://" + options.pop("prefill")) if "prefill" in options else ""
            address = cls(target, prefill, _port(options), options.pop("role", ""))
        except (ValueError, StartupError) as error:
            raise StartupError(f"{FORMS}, not {url!r}.") from error
        known = address.role in ("", "prefill", "decode") and not (address.role and address.prefill)
        lone = address.bootstrap and not address.prefill and address.role != "prefill"
        if options or not known or lone or not url.startswith(SCHEME) or split.path.strip("/"):
            raise StartupError(f"{FORMS}, not {url!r}.")
        return address

    @property
    def url(self) -> str:
        query = {"prefill": self.prefill, "bootstrap": self.bootstrap or "", "role": self.role}
        text = "&".join(f"{name}={value}" for name, value in query.items() if value)
        return f"{SCHEME}{self.target}" + (f"?{text}" if text else "")


def _port(query: dict[str, str]) -> int:
    """Remove the bootstrap port from a query and return it. Raises ValueError."""
    port = int(query.pop("bootstrap", "0"))
    if not 0 <= port < 1 << 16:
        raise ValueError(port)
    return port


def paired(urls: Iterable[str]) -> tuple[str, ...]:
    """Return *urls* with every decode worker of SGLang paired with every prefill worker, after all others.

    Raises StartupError if one of the two is missing.
    """
    urls = tuple(urls)
    addresses = {url: SglangAddress.read(url) for url in urls if url.startswith(SCHEME)}
    prefills = [address for address in addresses.values() if address.role == "prefill"]
    decodes = [address for address in addresses.values() if address.role == "decode"]
    if bool(prefills) != bool(decodes):
        raise StartupError(
            f"SGLang workers with ?role={(prefills or decodes)[0].role} need at least one worker of the other role."
        )
    others = tuple(url for url in urls if url not in addresses or not addresses[url].role)
    return others + tuple(
        SglangAddress(decode.target, source.target, source.bootstrap).url for decode in decodes for source in prefills
    )
