"""The database's secret key, and the names of tenants and items that are derived from it."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from blake3 import blake3

from saccade.errors import StartupError
from saccade.transport.credentials import TOO_OPEN

SECRET_BYTES: Final = 32
NAME_BYTES: Final = 16
_CONTEXT = "saccade 2026 state database, {}"


class StateKeys:
    """Derives names and keys from *secret*. Without it, nobody can tell whose a row is."""

    def __init__(self, secret: bytes) -> None:
        self._of_tenants = _derived(secret, "tenants")
        self._of_items = _derived(secret, "items")
        self._of_contents = _derived(secret, "contents")
        self.check = _derived(secret, "check")
        """Differs for each secret, and reveals nothing about it."""

    def tenant(self, tenant: bytes) -> bytes:
        """Return the database's name for the tenant with the id *tenant*."""
        return blake3(tenant, key=self._of_tenants).digest(NAME_BYTES)

    def item(self, tenant: bytes, kind: int, known_as: str) -> bytes:
        """Return the database's name for the item of *tenant* that clients know as *known_as*.

        The id of a file is a hash of its content, so it would show whether the tenant has a certain file.
        """
        return blake3(b"%d:%b:%b" % (kind, self.tenant(tenant), known_as.encode()), key=self._of_items).digest(
            NAME_BYTES
        )

    def content_key(self, tenant: bytes) -> bytes:
        """Return the key of 32 bytes that encrypts the contents of the tenant with the id *tenant*."""
        return blake3(tenant, key=self._of_contents).digest()


def _derived(secret: bytes, purpose: str) -> bytes:
    return blake3(secret, derive_key_context=_CONTEXT.format(purpose)).digest()


def read_key_file(path: Path) -> StateKeys:
    """Return the keys of the secret in *path*. A missing file is made, with mode 0600. Raises StartupError."""
    try:
        if not path.exists():
            _make_key_file(path)
        digits = path.read_text().strip()
        is_private = not path.stat().st_mode & TOO_OPEN
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--state-key-file {path}: cannot read or make it: {error}.") from error
    if not is_private:
        raise StartupError(f"--state-key-file {path}: other users may read it; run `chmod 600 {path}`.")
    try:
        secret = bytes.fromhex(digits)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise StartupError(f"--state-key-file {path}: it must have {2 * SECRET_BYTES} hexadecimal digits.")
    return StateKeys(secret)


def _make_key_file(path: Path) -> None:
    """Make *path*, unless another process does so first. No process ever reads half a key."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(SECRET_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
