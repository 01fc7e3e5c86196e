"""A gateway's credentials for its workers, as `saccade gateway` and `saccade doctor` take them."""

from dataclasses import dataclass
from pathlib import Path

from saccade.config import FLAT
from saccade.connectors.vllm import http as vllm_http
from saccade.errors import StartupError
from saccade.transport.credentials import WorkerCredentials, read_authorities, read_identity, read_token
from saccade.transport.wire import TLS_SCHEME


@FLAT
@dataclass(frozen=True)
class WorkerAccess:
    """The files with the credentials that workers over TCP ask for, and with the authorities that vouch for workers."""

    worker_token_file: Path | None = None
    "The file with the workers' token, vLLM's --api-key; only its owner and group may be able to read it."
    worker_tls_ca: Path | None = None
    "The authority of the certificates of grpcs:// and vllms:// workers, PEM; by default the public authorities."
    worker_tls_cert: Path | None = None
    "The gateway's certificate for workers that require one, PEM."
    worker_tls_key: Path | None = None
    "The key of --worker-tls-cert, PEM."

    def credentials(self, urls: tuple[str, ...]) -> WorkerCredentials:
        """Return the credentials. Raises StartupError if a file is wrong, or if none of *urls* can use the TLS flags.

        Without *urls*, workers become known later.
        """
        tls = (self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key)
        if any(tls) and urls and not any(url.startswith((TLS_SCHEME, vllm_http.ADDRESSES.tls_scheme)) for url in urls):
            raise StartupError(
                "--worker-tls-... needs a worker with TLS: pass --worker-url as grpcs://HOST:PORT or vllms://HOST:PORT."
            )
        return WorkerCredentials(
            token=read_token(self.worker_token_file) if self.worker_token_file is not None else None,
            authorities=read_authorities(self.worker_tls_ca, "--worker-tls-ca"),
            identity=read_identity(self.worker_tls_cert, self.worker_tls_key, "--worker-tls"),
        )


WORKER_ACCESS = WorkerAccess()
"""Every flag at its default."""
