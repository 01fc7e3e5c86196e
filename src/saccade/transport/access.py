"""Decides who may call a worker: by user over a Unix socket, and by token or client certificate over TCP."""

import hmac
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health

from saccade.errors import StartupError
from saccade.loopback import binds_to_loopback
from saccade.transport.credentials import Identity

ROOT = 0
OPEN_METHODS = frozenset(f"/{health.SERVICE_NAME}/{method}" for method in ("Check", "Watch"))
"""Open to every caller: the probes of Kubernetes send no token."""

REFUSAL = "The worker requires a token: give the gateway the worker's --worker-token-file."


@dataclass(frozen=True)
class Access:
    """What a worker requires of its callers.

    Over TCP, it requires each of these that is set: the *token*, TLS with the worker's *identity*, and client
    certificates from *client_authorities* (PEM).
    Over a Unix socket, the caller must run as *own_uid*, root or one of *allowed_uids*.
    """

    token: str | None = field(default=None, repr=False)
    identity: Identity | None = None
    client_authorities: bytes | None = None
    allowed_uids: tuple[int, ...] = ()
    own_uid: int = field(default_factory=os.geteuid)

    def check(self, bind: str) -> None:
        """Raise StartupError if any other machine could call a worker on *bind*, or if a setting has no effect."""
        if self.client_authorities is not None and self.identity is None:
            raise StartupError("--tls-client-ca needs --tls-cert and --tls-key.")
        over_tcp = self.token is not None or self.identity is not None
        if bind.startswith("unix:"):
            if over_tcp:
                raise StartupError(
                    "--worker-token-file and --tls-cert are for --host and --port; a Unix socket is open to its owner "
                    "and --allowed-uids only."
                )
            return
        if self.allowed_uids:
            raise StartupError("--allowed-uids is for Unix sockets (--uds), not for --host and --port.")
        if self.token is None and self.client_authorities is None and not binds_to_loopback(bind):
            raise StartupError(
                f"A worker that listens on {bind} can be called from other machines. Give --worker-token-file, or "
                "--tls-cert, --tls-key and --tls-client-ca; or listen on a loopback address or a Unix socket."
            )

    def remarks(self, bind: str) -> Iterator[str]:
        """Yield warnings for the operator about *bind*. Call check() first."""
        if bind.startswith("unix:"):
            return
        if self.token is None and self.client_authorities is None:
            yield (
                f"every user of this machine may call the worker on {bind}: --worker-token-file restricts it, and so "
                "does a Unix socket"
            )
        if self.identity is None and not binds_to_loopback(bind):
            yield f"the token and all prompts travel unencrypted to and from {bind}: --tls-cert and --tls-key hide them"

    def admits(self, uid: int) -> bool:
        """Return whether a process that runs as *uid* may open a stream over a Unix socket."""
        return uid in (self.own_uid, ROOT, *self.allowed_uids)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return gRPC's TLS credentials, or None without TLS."""
        if self.identity is None:
            return None
        pair = (self.identity.key, self.identity.certificate)
        return grpc.ssl_server_credentials([pair], self.client_authorities, self.client_authorities is not None)

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [_TokenGuard(self.token)] if self.token is not None else []


OWNER_ONLY = Access()


class _TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, except to OPEN_METHODS, before gRPC looks up the method."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method in OPEN_METHODS or self._has_token(details.invocation_metadata):
            return await continuation(details)
        return self._refusal

    def _has_token(self, metadata: Any) -> bool:
        tokens = [value for key, value in metadata or () if key == "authorization"]
        return len(tokens) == 1 and hmac.compare_digest(tokens[0].encode(), self._expected)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
