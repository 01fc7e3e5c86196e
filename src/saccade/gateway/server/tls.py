"""TLS at the gateway's port."""

import ssl

from saccade.errors import StartupError
from saccade.gateway.config import TlsSettings


def tls_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS settings of a server, None if it speaks plain HTTP. Raises StartupError, naming the flag."""
    if settings.certfile is None:
        if settings != TlsSettings():
            raise StartupError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile.")
        return None
    if settings.cert_reqs and settings.ca_certs is None:
        raise StartupError("--ssl-cert-reqs over 0 needs --ssl-ca-certs: the authority of the clients' certificates.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    flags, files = "--ssl-certfile and --ssl-keyfile", (settings.certfile, settings.keyfile)
    try:
        # Without a password OpenSSL would ask for the one of an encrypted key on the terminal.
        context.load_cert_chain(settings.certfile, settings.keyfile, password="")
        if settings.ca_certs is not None:
            flags, files = "--ssl-ca-certs", (settings.ca_certs, None)
            context.load_verify_locations(settings.ca_certs)
    except ssl.SSLError as error:
        raise StartupError(
            f"{flags} must be PEM: a certificate chain, and its key without a password. Look at {_names(files)}."
        ) from error
    except OSError as error:
        raise StartupError(f"{flags}: cannot read {_names(files)}: {error.strerror}.") from error
    context.verify_mode = ssl.VerifyMode(settings.cert_reqs)
    return context


def _names(files: tuple[object, object]) -> str:
    return " and ".join(str(file) for file in files if file is not None)
