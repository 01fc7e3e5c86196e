"""`saccade key`: a key for a tenant, and its entry for the file of --api-keys-file."""

import getpass
import secrets
import sys
from typing import Literal

from saccade.errors import StartupError
from saccade.gateway.tenants.key_table import NAME_FORM, NAME_RULE, digest_of

PREFIX = "sk-saccade-"
RANDOM_BYTES = 32

MIN_CHARACTERS = 32
MIN_DISTINCT = 8
"""A key that was made elsewhere has at least this many different characters. SHA-256 is fast, so that one with fewer
could be guessed; 32 random hexadecimal digits almost never have fewer."""


def key(action: Literal["new", "hash"], *, tenant: str) -> None:
    """Make a key for a tenant: its entry for --api-keys-file on stdout, and the key itself on stderr, only this once.

    `saccade key new --tenant acme >> keys.toml` adds a new key; `saccade key hash` one that you have.

    Parameters
    ----------
    action
        new makes a key; hash reads one of at least 32 characters from stdin.
    tenant
        The tenant's name, as in [tenants.NAME] of the file.
    """
    if NAME_FORM.fullmatch(tenant) is None:
        raise StartupError(f"--tenant must be {NAME_RULE}.")
    if action == "new":
        secret = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
        print(f"The key of {tenant}, which is not shown again: {secret}", file=sys.stderr)
    else:
        secret = _read_key()
    print(f'\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of(secret.encode()).hex()}"')


def _read_key() -> str:
    """Return the key on stdin. Raises StartupError if it could be guessed, or cannot be sent in a header."""
    is_typed = sys.stdin.isatty()
    text = (getpass.getpass("Key: ") if is_typed else sys.stdin.readline()).strip()
    if not text.isascii() or text.split() != [text]:
        raise StartupError("The key on stdin is empty, or has a space or a character that is not ASCII.")
    if len(text) < MIN_CHARACTERS or len(set(text)) < MIN_DISTINCT:
        raise StartupError(
            f"The key on stdin could be guessed: it must have at least {MIN_CHARACTERS} characters, {MIN_DISTINCT} of "
            "them different. `saccade key new` makes one."
        )
    return text
