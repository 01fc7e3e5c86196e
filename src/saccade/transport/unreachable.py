"""Explains why a client cannot reach a server, for the person who named the server's URL."""

import errno
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

OF_CERTIFICATES = {
    9: "is not valid yet",
    10: "has expired",
    62: "is for another name than that of the URL",
    64: "is for another address than that of the URL",
}
"""What is wrong with a server's certificate, by the code of OpenSSL's verification (X509_V_ERR_*)."""

SCHEMES = {"http": "https", "grpc": "grpcs", "vllm": "vllms"}
"""The schemes of URLs without TLS, and those with it."""

NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH)


def why_unreachable(url: str, error: BaseException, remedy: str, authority: str = "SSL_CERT_FILE=ca.pem") -> str:
    """Return the cause of *error*, which ended a connection to *url*, and what to do.

    *remedy* is a sentence that helps if nothing listens there. *authority* shows how to make the client
    trust a private authority.
    """
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return _of_certificate(url, cause, authority)
            case ssl.SSLError():
                return _of_tls(url, cause)
            case socket.gaierror():
                return f"No name server knows the host of {url}. Correct the URL, or see to the network."
            case TimeoutError():
                return f"{url} does not answer in time. The server may be busy, or a firewall between drops packets."
            case OSError(errno=number) if number in NO_ROUTE:
                return f"No network leads to {url}. Correct the address, or see to the network."
            case ConnectionRefusedError():
                return f"No server answers at {url}. {remedy}"
    if urlsplit(url).hostname is None:
        return f"{url} is no address of a server. {remedy}"
    return f"The server at {url} closed the connection.{_of_scheme(url)}"


def is_refused(error: BaseException) -> bool:
    """Return whether *error* means that nothing listens at the address."""
    return any(isinstance(cause, ConnectionRefusedError) for cause in _causes(error))


def proxy_hint(url: str) -> str:
    """Return a sentence, after a space, about the proxy that the environment names for *url*; "" if there is none."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    name = parts.scheme if parts.scheme in proxies else "all"
    if name not in proxies or urllib.request.proxy_bypass(parts.netloc):
        return ""
    proxy = urlsplit(proxies[name]).netloc.rpartition("@")[2]
    around = f"NO_PROXY={parts.hostname} avoids it."
    return f" The way there leads through the proxy {proxy} of {name.upper()}_PROXY; {around}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of *error*, the first cause first, and *error* itself last."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    return reversed(chain)


def _of_certificate(url: str, error: ssl.SSLCertVerificationError, authority: str) -> str:
    known = OF_CERTIFICATES.get(getattr(error, "verify_code", 0))
    if known is not None:
        return f"The certificate of {url} {known}."
    return (
        f"{url} has a certificate of an authority that this machine does not know. If it is yours, name its file: "
        f"{authority}."
    )


def _of_tls(url: str, error: ssl.SSLError) -> str:
    reason = str(error.reason)
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return f"{url} asks for a client's certificate, which this command does not have."
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return f"{url} does not speak TLS.{_of_scheme(url)}"
    return f"The TLS handshake with {url} fails.{_of_scheme(url)}"


def _of_scheme(url: str) -> str:
    scheme = urlsplit(url).scheme
    other = SCHEMES.get(scheme) or next((plain for plain, tls in SCHEMES.items() if tls == scheme), None)
    return "" if other is None else f" Perhaps its address begins with {other}://."
