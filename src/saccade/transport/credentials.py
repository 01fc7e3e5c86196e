"""Reads the token and certificates that gateways and workers present to each other over TCP."""

import functools
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import grpc

from saccade.errors import StartupError
from saccade.transport.grpc_calls import GrpcCalls
from saccade.transport.wire import CALLS, CLIENT_OPTIONS, PING_SECONDS, SERVICE_NAME, TLS_SCHEME, target

MIN_TOKEN_CHARACTERS = 16
TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO
"""A group may read a secret, because containers mount secrets from volumes that way."""


@dataclass(frozen=True)
class Identity:
    """A certificate with its intermediate certificates, and its key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class WorkerCredentials:
    """The credentials that a gateway shows its workers, and the *authorities* (PEM) that vouch for workers with TLS.

    Without *authorities*, gRPC's library trusts the public ones that it bundles; other connections trust the system's.
    """

    token: str | None = field(default=None, repr=False)
    authorities: bytes | None = None
    identity: Identity | None = None

    def channel(self, url: str) -> grpc.aio.Channel:
        """Return a channel to the worker at *url*, with TLS if the url begins with grpcs://."""
        if not url.startswith(TLS_SCHEME):
            return grpc.aio.insecure_channel(target(url), options=CLIENT_OPTIONS)
        key = self.identity.key if self.identity is not None else None
        chain = self.identity.certificate if self.identity is not None else None
        secrets = grpc.ssl_channel_credentials(self.authorities, key, chain)
        return grpc.aio.secure_channel(target(url), secrets, options=CLIENT_OPTIONS)

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS settings for connections that gRPC's own library does not make."""
        authorities = self.authorities.decode("ascii", errors="replace") if self.authorities is not None else None
        context = ssl.create_default_context(cadata=authorities)
        if self.identity is not None:
            # The library reads a certificate and its key from a file only.
            with os.fdopen(os.memfd_create("identity"), "wb") as file:
                file.write(self.identity.key + b"\n" + self.identity.certificate)
                file.flush()
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call, which has the token if there is one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token is not None else ()

    def calls(self, channel: grpc.aio.Channel) -> SimpleNamespace:
        """Return the worker's CALLS by name; each one sends the token."""
        calls = SimpleNamespace()
        for name, (kind, request, reply) in CALLS.items():
            call = getattr(channel, kind)(f"/{SERVICE_NAME}/{name}", request.SerializeToString, reply.FromString)
            setattr(calls, name, functools.partial(call, metadata=self.metadata))
        return calls

    def streams(self, url: str, max_message_bytes: Callable[[], int]) -> GrpcCalls:
        """Return an object that makes Stream calls to the worker at *url*, over connections of its own."""
        tls = self.tls_context() if url.startswith(TLS_SCHEME) else None
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        return GrpcCalls(target(url), tls, PING_SECONDS, max_message_bytes)


NO_CREDENTIALS = WorkerCredentials()


def read_token(path: Path) -> str:
    """Return the token in the file *path*.

    Raises StartupError if the file cannot be read, or if others may read or change it. Also raises it
    if the token has fewer than MIN_TOKEN_CHARACTERS, or is not one word of printable ASCII.
    """
    token = _read(path, "--worker-token-file").strip()
    _check_private(path)
    if len(token) < MIN_TOKEN_CHARACTERS or not all(0x21 <= byte < 0x7F for byte in token):
        raise StartupError(
            f"The token in {path} must be one word of at least {MIN_TOKEN_CHARACTERS} printable ASCII characters, as "
            "from: openssl rand -hex 32"
        )
    return token.decode()


def read_identity(certificate: Path | None, key: Path | None, prefix: str = "--tls") -> Identity | None:
    """Read the files that the flags *prefix*-cert and *prefix*-key name, or return None if neither is set.

    Raises StartupError if only one is set, or if others may read or change the key. Also raises it if the
    files are not a certificate and its unencrypted key.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise StartupError(f"{prefix}-cert and {prefix}-key belong together: give both or neither.")
    identity = Identity(_read(certificate, f"{prefix}-cert"), _read(key, f"{prefix}-key"))
    _check_private(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise StartupError(
            f"{certificate} and {key} are not a certificate and its key, unencrypted, in PEM ({prefix}-cert, "
            f"{prefix}-key)."
        ) from error
    return identity


def read_authorities(path: Path | None, flag: str) -> bytes | None:
    """Read the authorities' certificates from *path*, the value of *flag*, or return None if it is not set.

    Raises StartupError if the file cannot be read or has no certificates.
    """
    if path is None:
        return None
    content = _read(path, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        raise StartupError(f"{path} holds no certificates in PEM ({flag}).") from error
    return content


def _check_private(path: Path) -> None:
    if stat.S_IMODE(path.stat().st_mode) & TOO_OPEN:
        raise StartupError(f"Other users may read or change {path}, which is a secret. Run: chmod 600 {path}")


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{path} cannot be read ({flag}): {error.strerror}.") from error
