"""`saccade key`: a key for a tenant, and its entry for the file of --api-keys-file."""

import getpass
import secrets
import sys
from typing import Literal

from saccade.errors import StartupError
from saccade.gateway.tenants.api_keys import NAME_FORM, NAME_RULE, digest_of

PREFIX = "sk-saccade-"
RANDOM_BYTES = 32

MIN_CHARACTERS = 32
MIN_DISTINCT = 8
"""A key that was made elsewhere has at least so many characters, and different ones: fewer could be guessed, since a
SHA-256 is quickly computed. 32 random hexadecimal digits have all but never fewer."""


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
        made = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
        print(f"The key of {tenant}, which is not shown again: {made}", file=sys.stderr)
    else:
        made = _given()
    print(f'\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of(made.encode()).hex()}"')


def _given() -> str:
    """Return the key on stdin. Raises StartupError where it could be guessed, or not be sent in a header."""
    is_typed = sys.stdin.isatty()
    given = (getpass.getpass("Key: ") if is_typed else sys.stdin.readline()).strip()
    if not given.isascii() or given.split() != [given]:
        raise StartupError("The key on stdin is empty, or has a space or a character that is not ASCII.")
    if len(given) < MIN_CHARACTERS or len(set(given)) < MIN_DISTINCT:
        raise StartupError(
            f"The key on stdin could be guessed: it must have at least {MIN_CHARACTERS} characters, {MIN_DISTINCT} of "
            "them different. `saccade key new` makes one."
        )
    return given
