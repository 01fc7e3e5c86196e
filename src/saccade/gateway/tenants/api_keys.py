"""ApiKeyStore: the accounts of all tenants by their keys. It follows the file of --api-keys-file:

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

A key is 256 random bits, so nobody can search for it by a plain hash; slow hashes are for passwords, which people
choose. Errors name the entry and never its value, which could be a key that was put there by mistake.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.config import parse_toml
from saccade.errors import InvalidApiKey, StartupError
from saccade.gateway.tenants.account import EVERYBODY, Account, Limits, Tenant, key_tenant, named_tenant
from saccade.metric_registry import filled
from saccade.protocol.gateway_calls import TenantUsage, total
from saccade.watched_file import WatchedFile

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
MAX_PRIORITY = 100
MAX_LIMIT = 1 << 50
MIN_SALT_KEY_CHARACTERS = 32
NAME_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "up to 64 letters, digits, `.`, `_` and `-`, the first a letter or a digit"
TENANT_LABEL = "tenant"
"""The label of metrics that name a tenant."""

_HASH_FORM = re.compile(r"[0-9a-fA-F]{64}")
_TOP = ("salt_key", "tenants", "keys")
_OF_TENANT = ("group", "priority", "requests_per_minute", "tokens_per_minute", "image_bytes_per_minute")
_OF_KEY = ("tenant", "sha256")
OLD_NAMES: Mapping[str, str] = MappingProxyType({"picture_bytes_per_minute": "image_bytes_per_minute"})
"""Of a tenant's limits; they are read until the next release."""


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

    *flags* are the flags of keys by hash; the file must not contain those keys.
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
    """Return a number of an entry, None if it is missing."""
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


FLAG = "--api-keys-file"
LOOK_SECONDS = 1.0
"""Between two checks of the file."""

NOT_WATCHED = "it is not watched"
UNFORESEEN = "an unforeseen error, which the log has"


def flag_keys(api_keys: Iterable[str], admin_keys: Iterable[str]) -> dict[bytes, str]:
    """Return the flags of keys by the keys' hashes."""
    flags = {digest_of(key.encode()): "--admin-key" for key in admin_keys}
    return flags | {digest_of(key.encode()): "--api-key" for key in api_keys}


def read_keys_file(file: WatchedFile, flags: Mapping[bytes, str]) -> KeyTable:
    """Return parse_keys() of *file* when a program starts. Raises StartupError that names the file."""
    try:
        return parse_keys(file.read() or b"", flags)
    except StartupError as error:
        raise StartupError(f"{FLAG} {file.path}: {error.message}") from error


class ApiKeyStore:
    """The accounts of the tenants with *api_keys*, one each, and of those in the file at *path*.

    Without both, everybody shares one account. *kind* names the keys in errors. *admin_keys* must not be in the file.
    Each of *num_processes* gateway processes has its share of the limits. *named* are the accounts of the file's
    tenants, by name; *everybody* is the account of requests without key. *fault* says why the current file is not used,
    "" if it is. Raises StartupError.
    """

    def __init__(
        self,
        api_keys: Iterable[str] = (),
        path: Path | None = None,
        admin_keys: Iterable[str] = (),
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        kind: Literal["API", "admin"] = "API",
    ) -> None:
        self._kind = kind
        self.named: dict[str, Account] = {}
        self.fault = ""
        self._content_fault = ""
        self.everybody = Account(EVERYBODY)
        self._flags = flag_keys(api_keys, admin_keys)
        self._num_processes = num_processes
        self._clock = clock
        self._of_flags = {digest_of(key.encode()): Account(key_tenant(key.encode())) for key in api_keys}
        self._of_file: dict[bytes, Account] = {}
        self._file = None if path is None else WatchedFile(path, MAX_BYTES)
        if self._file is not None:
            self._take(read_keys_file(self._file, self._flags))

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return self._file is None and not self._of_flags

    def account(self, key: bytes) -> Account:
        """Return the account of *key*, or everybody's if there are no keys. Raises InvalidApiKey."""
        if self.is_open:
            return self.everybody
        if not key:
            raise InvalidApiKey(f"Send an {self._kind} key in the header: Authorization: Bearer KEY.")
        # The time of the look-up of a hash reveals nothing about the keys: nobody can choose the hash of a guess.
        digest = digest_of(key)
        account = self._of_file.get(digest) or self._of_flags.get(digest)
        if account is None:
            raise InvalidApiKey(f"This {self._kind} key is not known here.")
        return account

    def usages(self) -> dict[str, TenantUsage]:
        """Return the usage of each tenant of the file at this process, by name."""
        return {name: account.usage for name, account in self.named.items()}

    async def follow(self) -> None:
        """Reload the file whenever it has changed, until this is cancelled."""
        try:
            while self._file is not None:
                await asyncio.sleep(LOOK_SECONDS)
                await self.look()
        finally:
            self.fault = self.fault or NOT_WATCHED

    async def look(self) -> None:
        """Reload the file if it has changed. If it has a fault, the last content stays in force."""
        if self._file is None:
            return
        try:
            content = await asyncio.to_thread(self._file.read)
        except StartupError as error:
            self._note(error.message)
            return
        if content is not None:
            # Set until the file is used: after an unforeseen error it is not read again before it changes.
            self._content_fault = UNFORESEEN
            self._content_fault = self._use(content)
        self._note(self._content_fault)

    def _use(self, content: bytes) -> str:
        """Use a new *content* of the file; return why it cannot be used, "" if it is."""
        try:
            table = parse_keys(content, self._flags)
        except StartupError as error:
            return error.message
        self._take(table)
        logger.info("%s is read again: %d keys of %d tenants", FLAG, len(table.names), len(table.tenants))
        return ""

    def _take(self, table: KeyTable) -> None:
        """Use *table*. Tenants of the last table keep their account."""
        accounts = {}
        for name, tenant in table.tenants.items():
            account = self.named.get(name)
            if account is None:
                account = Account(tenant, self._num_processes, self._clock)
            else:
                account.change(tenant)
            accounts[name] = account
        self.named = accounts
        self._of_file = {digest: accounts[name] for digest, name in table.names.items()}

    def _note(self, fault: str) -> None:
        """Log a *fault* of the file, once."""
        if fault and fault != self.fault:
            logger.error("%s is not used as it is now, its last content stays in force: %s", FLAG, fault)
        self.fault = fault


NO_USAGE = TenantUsage()
DESCRIPTIONS = {
    "requests": "Ended requests of a tenant, but for those that its limits refused at once and those that got 503.",
    "refused": "Requests of a tenant that one of its limits refused.",
    "prompt_tokens": "Tokens of a tenant's prompts.",
    "cached_tokens": "Tokens of a tenant's prompts that were computed before.",
    "completion_tokens": "Tokens that were generated for a tenant.",
    "image_bytes": "Bytes of a tenant's encoded images.",
}


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant of the keys file: its limits, None if there is none, and its usage."""

    tenant: str
    group: str
    priority: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    image_bytes_per_minute: int | None
    usage: TenantUsage


def tenant_reports(accounts: Mapping[str, Account], usages: Sequence[Mapping[str, TenantUsage]]) -> list[TenantReport]:
    """Return the report of each of *accounts*; *usages* are the usage at every process, by tenant."""
    reports = []
    for name, account in sorted(accounts.items()):
        tenant = account.tenant
        reports.append(
            TenantReport(
                tenant=name,
                group=tenant.group,
                priority=tenant.priority,
                requests_per_minute=tenant.limits.requests,
                tokens_per_minute=tenant.limits.tokens,
                image_bytes_per_minute=tenant.limits.image_bytes,
                usage=total(TenantUsage, [of_process.get(name, NO_USAGE) for of_process in usages]),
            )
        )
    return reports


class TenantMetrics(Collector):
    """The usage of each tenant, and whether the current keys file is used. No metrics without a keys file."""

    def __init__(self, api_keys: ApiKeyStore) -> None:
        self._api_keys = api_keys

    def collect(self) -> Iterable[Metric]:
        if not (usages := self._api_keys.usages()):
            return
        for field, words in DESCRIPTIONS.items():
            family = CounterMetricFamily(f"saccade_tenant_{field}", words, labels=(TENANT_LABEL,))
            yield filled(family, [((name,), getattr(usage, field)) for name, usage in usages.items()])
        is_current = 0 if self._api_keys.fault else 1
        yield GaugeMetricFamily(
            "saccade_api_keys_file_current", "Whether the keys file is used as it is now.", value=is_current
        )
