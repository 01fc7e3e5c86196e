"""Parses and checks image URLs. A URL is parsed once, and the object that was checked is the one that is fetched.

A URL that two parsers understand differently can bypass checks. URLs with backslashes, control characters, a user name,
or a host that is neither a name nor a canonical address are therefore refused.
"""

import ipaddress
import re
import unicodedata
from collections.abc import Iterable

from yarl import URL

from saccade.errors import InvalidImageUrl, StartupError
from saccade.media.refusals import Refusals

NOT_FETCHED = (
    "The URL cannot be fetched: it must be an http or https URL of a host that answers and that this server "
    "may reach. Otherwise send the file itself as a data: URL in base64."
)
"""The message for refused URLs and for hosts that are forbidden, unknown or silent; it does not reveal which."""

_INSTEAD = "Send the file itself as a data: URL in base64, as `data:image/png;base64,iVBORw0...`"
FILES_NOT_READ = f"The URL names a file, and this server reads no files. {_INSTEAD}, or an http or https URL."
FILE_NOT_READ = (
    "The file cannot be read: a file: URL must name a regular file in the folder that this server's operator allows, "
    "by its whole path. Otherwise send the file itself as a data: URL in base64."
)
"""The message for files that are missing or forbidden; it does not reveal which."""

BARE_BASE64 = (
    "The URL is base64 without a prefix: write `data:image/png;base64,` (or image/jpeg, video/mp4 and so on) "
    "in front of it."
)
NO_SCHEME = (
    "The URL has no scheme, so it is a path or a name, and this server opens no paths. "
    f"{_INSTEAD}, or a URL that begins with http:// or https://."
)
NO_SCHEME_OF_A_FILE = (
    "The URL has no scheme, so it is a path or a name. A file that this server may read is named by its whole path "
    f"after file://, as `file:///folder/image.png`. {_INSTEAD}, or a URL that begins with http:// or https://."
)
UNKNOWN_SCHEME = f"The URL must begin with http:// or https://. {_INSTEAD}, unless it is on a web server."
UNSUPPORTED_SCHEME = "Nothing is fetched from {scheme}: URLs. " + f"{_INSTEAD}, or an http or https URL."

_NAMED_SCHEMES = frozenset(
    {"abfs", "az", "blob", "cid", "ftp", "ftps", "gs", "hdfs", "hf", "ipfs", "oss", "s3", "sftp", "ws", "wss"}
)
"""Schemes that an error message may repeat; others are arbitrary text of a client."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.ASCII | re.IGNORECASE)  # a single letter is a Windows drive
_HOST_AND_PORT = re.compile(r"[a-z0-9.-]+:[0-9]+(/|$)", re.ASCII | re.IGNORECASE)
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # PNG, JPEG, GIF, WebP
_BASE64_MEDIA = re.compile(r"(image|video)/[a-z0-9.+-]+;base64,", re.ASCII | re.IGNORECASE)
_LONG_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{256}", re.ASCII)

_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"})
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*\.?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII | re.IGNORECASE)


class UrlReader:
    """Parses URLs of at most *max_characters* that name an allowed host.

    *allowed_domains* are exact names or `*.suffix`, which does not include the suffix itself; an empty list allows all.
    *refusals* logs refusals, but no names. If the server *reads_files*, the error about a path says how to name a file.
    Raises StartupError if a domain is malformed.
    """

    def __init__(
        self,
        allowed_domains: Iterable[str] = (),
        max_characters: int = 8192,
        refusals: Refusals | None = None,
        *,
        reads_files: bool = False,
    ) -> None:
        self._domains = frozenset(_canonical_domain(domain) for domain in allowed_domains)
        self._max_characters = max_characters
        self._refusals = refusals or Refusals()
        self._no_scheme = NO_SCHEME_OF_A_FILE if reads_files else NO_SCHEME

    def read_url(self, text: str) -> URL:
        """Return *text* as an http, https or file URL. Raises InvalidImageUrl."""
        _check_kind(text, self._no_scheme)
        if len(text) > self._max_characters:
            raise InvalidImageUrl(f"The URL has {len(text)} characters; at most {self._max_characters} are accepted.")
        url = _parse(text)
        if url.scheme != "file":
            self._check_host(url)
        return url

    def follow(self, url: URL, location: str) -> URL:
        """Return the target of a redirect from *url*. Raises InvalidImageUrl, also if it leads from https to http."""
        if len(location) > self._max_characters:
            raise InvalidImageUrl(NOT_FETCHED)
        target = url.join(_parse(location, is_relative=True)).with_fragment(None)
        if target.scheme not in ("http", "https") or (url.scheme, target.scheme) == ("https", "http"):
            raise InvalidImageUrl(NOT_FETCHED)
        self._check_host(target)
        return target

    def _check_host(self, url: URL) -> None:
        host = url.raw_host or ""
        if "@" in url.raw_authority or not _is_plain(host):
            raise InvalidImageUrl(NOT_FETCHED)
        if not self._is_allowed(host):
            self._refusals.note("the host is not on the list", "--allowed-media-domains")
            raise InvalidImageUrl(NOT_FETCHED)

    def _is_allowed(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        labels = host.split(".")
        suffixes = ("*." + ".".join(labels[start:]) for start in range(1, len(labels)))
        return not self._domains or host in self._domains or any(suffix in self._domains for suffix in suffixes)


def _check_kind(text: str, no_scheme: str) -> None:
    """Raise InvalidImageUrl, with a message that fits what *text* looks like, unless it is a supported kind of URL.

    For a path or a name, the message is *no_scheme*. It depends only on the text, so it reveals nothing about reachable
    hosts.
    """
    start = text[:512].strip()
    if start.startswith(_BASE64_STARTS) or _BASE64_MEDIA.match(start) or _LONG_BASE64.match(start):
        raise InvalidImageUrl(BARE_BASE64)
    match = _SCHEME.match(start)
    scheme = match.group(1).lower() if match else ""
    if scheme in _NAMED_SCHEMES:
        raise InvalidImageUrl(UNSUPPORTED_SCHEME.format(scheme=scheme))
    if not match and start:
        raise InvalidImageUrl(no_scheme)
    if scheme not in ("http", "https", "file"):
        raise InvalidImageUrl(no_scheme if _HOST_AND_PORT.match(start) else UNKNOWN_SCHEME)


def _parse(text: str, is_relative: bool = False) -> URL:
    is_plain = not any(unicodedata.category(character) in _REFUSED_CATEGORIES for character in text)
    if not is_plain or "\\" in text or "%00" in text:
        raise InvalidImageUrl(NOT_FETCHED)
    try:
        # A URL in ASCII is already encoded: quoting it again would break signed URLs.
        url = URL(text, encoded=text.isascii())
        _ = url.raw_host, url.port
    except ValueError:
        raise InvalidImageUrl(NOT_FETCHED) from None
    if url.scheme.lower() not in (("http", "https", "") if is_relative else ("http", "https", "file")):
        raise InvalidImageUrl(NOT_FETCHED)
    return url


def _is_plain(host: str) -> bool:
    """Return whether *host* is a name or a canonical address; 127.1 and 0x7f.1 are neither."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        return _NAME.fullmatch(host) is not None and _NUMBER.fullmatch(last) is None
    return "%" not in host


def _canonical_domain(domain: str) -> str:
    star, name = ("*.", domain[2:]) if domain.startswith("*.") else ("", domain)
    try:
        host = URL.build(scheme="http", host=name).raw_host or ""
    except ValueError:
        host = ""
    if not _is_plain(host):
        raise StartupError(
            f"--allowed-media-domains must be names such as images.example.com or *.example.com, got {domain!r}."
        )
    return star + host.lower().rstrip(".")
