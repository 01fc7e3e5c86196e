"""The tenants and keys in the file of --api-keys-file:

    salt_key = "..."                      # optional: makes the salts of caches unguessable

    [tenants.acme]
    group = "research"                    # optional, as are the lines below
    priority = 2
    requests_per_minute = 600
    tokens_per_minute = 200_000
    image_bytes_per_minute = 50_000_000

    [[keys]]
    tenant = "acme"
    sha256 = "..."                        # of the key; `saccade key new --tenant acme` prints one

A key is 256 random bits, so a plain hash is enough: nobody can guess the key. Slow hashes are for passwords, which
people choose. Errors name the entry and never its value, which could be a key put there by mistake.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from saccade.config import parse_toml
from saccade.errors import StartupError
from saccade.gateway.tenants.account import Limits, Tenant, named_tenant

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
MAX_PRIORITY = 100
MAX_LIMIT = 1 << 50
MIN_SALT_KEY_CHARACTERS = 32
NAME_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "up to 64 letters, digits, `.`, `_` and `-`, the first a letter or a digit"
_HASH_FORM = re.compile(r"[0-9a-fA-F]{64}")
_TOP = ("salt_key", "tenants", "keys")
_OF_TENANT = ("group", "priority", "requests_per_minute", "tokens_per_minute", "image_bytes_per_minute")
_OF_KEY = ("tenant", "sha256")

OLD_NAMES: Mapping[str, str] = MappingProxyType({"picture_bytes_per_minute": "image_bytes_per_minute"})
"""Of a tenant's limits; they are read until the next release."""


FLAG = "--api-keys-file"


@dataclass(frozen=True)
class KeyTable:
    """The *tenants* by name, and their names by the SHA-256 of each key."""

    tenants: Mapping[str, Tenant]
    names: Mapping[bytes, str]


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return sha256(key).digest()


def parse_keys(content: bytes, flags: Mapping[bytes, str]) -> KeyTable:
    """Return the table in *content*. Raises StartupError, which names the line or the entry.

    *flags* maps the hashes of other keys to the flags that set them; the file must not contain those keys.
    """
    table = parse_toml(content)
    _check_names(table, _TOP, "at the top level")
    salt_key = table.get("salt_key", "")
    if not isinstance(salt_key, str) or 0 < len(salt_key) < MIN_SALT_KEY_CHARACTERS:
        raise StartupError(f"`salt_key` must be a text of at least {MIN_SALT_KEY_CHARACTERS} characters.")
    declared, entries = table.get("tenants", {}), table.get("keys", [])
    if not isinstance(declared, dict) or not isinstance(entries, list):
        raise StartupError("`tenants` must be tables such as [tenants.acme], and `keys` tables such as [[keys]].")
    if not entries:
        raise StartupError("There is no [[keys]], so nobody could send requests; `saccade key new` prints one.")
    tenants = {name: _tenant(name, entry, salt_key) for name, entry in declared.items()}
    names: dict[bytes, str] = {}
    for number, entry in enumerate(entries, 1):
        place = f"[[keys]] number {number}"
        digest, name = _key(entry, place, tenants)
        if digest in names:
            raise StartupError(f"{place} has the same `sha256` as one before it.")
        if digest in flags:
            raise StartupError(f"{place} has a key that is also given by {flags[digest]}; a key belongs in one place.")
        names[digest] = name
    return KeyTable(tenants, names)


def _tenant(name: str, entry: object, salt_key: str) -> Tenant:
    place = f"[tenants.{name}]"
    if NAME_FORM.fullmatch(name) is None:
        raise StartupError(f"A tenant's name must be {NAME_RULE}; one of [tenants] is not.")
    if not isinstance(entry, dict):
        raise StartupError(f"{place} must be a table.")
    entry = _with_new_names(entry, place)
    _check_names(entry, _OF_TENANT, f"in {place}")
    group = entry.get("group", "")
    if not isinstance(group, str) or (group and NAME_FORM.fullmatch(group) is None):
        raise StartupError(f"`group` in {place} must be {NAME_RULE}.")
    priority = _number(entry, "priority", MAX_PRIORITY, place) or 1
    limits = (_number(entry, f"{what}_per_minute", MAX_LIMIT, place) for what in ("requests", "tokens", "image_bytes"))
    return named_tenant(name, group, priority, Limits(*limits), salt_key)


def _key(entry: object, place: str, tenants: Mapping[str, Tenant]) -> tuple[bytes, str]:
    """Return the hash in an entry of `keys`, and its tenant's name."""
    if not isinstance(entry, dict):
        raise StartupError(f"{place} must be a table.")
    _check_names(entry, _OF_KEY, f"in {place}")
    name, digest = entry.get("tenant"), entry.get("sha256")
    if not isinstance(name, str) or name not in tenants:
        raise StartupError(f"`tenant` in {place} must name a tenant of the file, such as acme for [tenants.acme].")
    if not isinstance(digest, str) or _HASH_FORM.fullmatch(digest) is None:
        raise StartupError(
            f"`sha256` in {place} must be the 64 hexadecimal digits of a key's SHA-256, not the key itself; `saccade "
            f"key new --tenant {name}` prints a new key and its entry."
        )
    return bytes.fromhex(digest), name


def _number(entry: Mapping[str, Any], name: str, most: int, place: str) -> int | None:
    """Return the number *name* in an entry, or None if it is missing."""
    number = entry.get(name)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= most:
        raise StartupError(f"`{name}` in {place} must be a whole number from 1 to {most}.")
    return number


def _check_names(table: Mapping[str, Any], names: tuple[str, ...], place: str) -> None:
    if any(name not in names for name in table):
        raise StartupError(f"There is an unknown name {place}; known are {', '.join(f'`{name}`' for name in names)}.")


def _with_new_names(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return *entry* with the new names of limits, and warn about old ones."""
    renamed = {OLD_NAMES.get(name, name): value for name, value in entry.items()}
    for old in entry.keys() & OLD_NAMES.keys():
        if OLD_NAMES[old] in entry:
            raise StartupError(f"`{old}` in {place} is the old name of `{OLD_NAMES[old]}`, which is there, too.")
        logger.warning(
            "%s: %s in %s is the old name of %s; the next release does not know it", FLAG, old, place, OLD_NAMES[old]
        )
    return renamed
