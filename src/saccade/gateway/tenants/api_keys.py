"""ApiKeyStore, which finds tenants' accounts by their keys, and follows changes to the keys file."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from saccade.errors import InvalidApiKey, StartupError
from saccade.gateway.tenants.account import EVERYBODY, Account, Ledger, key_tenant
from saccade.gateway.tenants.key_table import FLAG, MAX_BYTES, KeyTable, digest_of, parse_keys
from saccade.protocol.gateway_calls import TenantUsage
from saccade.watched_file import WatchedFile

logger = logging.getLogger(__name__)


LOOK_SECONDS = 1.0
"""Between two checks of the file."""

NOT_WATCHED = "it is not watched"
UNFORESEEN = "an unforeseen error, which the log has"


def flag_keys(api_keys: Iterable[str], admin_keys: Iterable[str]) -> dict[bytes, str]:
    """Return the flag that each key came from, keyed by the key's hash."""
    flags = {digest_of(key.encode()): "--admin-key" for key in admin_keys}
    return flags | {digest_of(key.encode()): "--api-key" for key in api_keys}


def read_keys_file(file: WatchedFile, flags: Mapping[bytes, str]) -> KeyTable:
    """Parse the keys file *file* at a program's start. Raises a StartupError that names the file."""
    try:
        return parse_keys(file.read_content() or b"", flags)
    except StartupError as error:
        raise StartupError(f"{FLAG} {file.path}: {error.message}") from error


class ApiKeyStore:
    """Finds the accounts of all tenants by their keys. Without keys, everybody shares one account.

    Raises a StartupError that names the keys file if it cannot be read or is malformed.

    - api_keys: keys of tenants that have an account each, without limits.
    - path: the file with other tenants and their keys.
    - admin_keys: keys that must not be in the file.
    - kind: names the keys in errors.
    - num_processes: how many gateway processes share the limits.
    - ledger: the usage and the limits of all accounts, if a database keeps them.
    - named: the accounts of the file's tenants, by name.
    - everybody: the account of requests without a key.
    - fault: why the current content of the file is not used; "" if it is used.
    """

    def __init__(
        self,
        api_keys: Iterable[str] = (),
        path: Path | None = None,
        admin_keys: Iterable[str] = (),
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        kind: Literal["API", "admin"] = "API",
        ledger: Ledger | None = None,
    ) -> None:
        self._kind = kind
        self.named: dict[str, Account] = {}
        self.fault = ""
        self._content_fault = ""
        self._ledger = ledger
        self.everybody = Account(EVERYBODY, ledger=ledger)
        self._flags = flag_keys(api_keys, admin_keys)
        self._num_processes = num_processes
        self._clock = clock
        of_flags = {digest_of(key.encode()): key_tenant(key.encode()) for key in api_keys}
        self._of_flags = {digest: Account(tenant, ledger=ledger) for digest, tenant in of_flags.items()}
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
        """Return each keys-file tenant's usage at this process, by name."""
        return {name: account.usage for name, account in self.named.items()}

    def accounts(self) -> list[Account]:
        """Return the accounts of all tenants."""
        everybody = [self.everybody] if self.is_open else []
        return [*everybody, *self._of_flags.values(), *self.named.values()]

    async def give_back(self) -> None:
        """Return units of limits that are not used here. Raises StoreUnavailable."""
        for account in tuple(self.named.values()):
            await account.give_back()

    async def follow(self) -> None:
        """Reload the file whenever it has changed, until cancelled."""
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
            content = await asyncio.to_thread(self._file.read_content)
        except StartupError as error:
            self._note(error.message)
            return
        if content is not None:
            # Set until the file is used: after an unforeseen error it is not read again before it changes.
            self._content_fault = UNFORESEEN
            self._content_fault = self._use(content)
        self._note(self._content_fault)

    def _use(self, content: bytes) -> str:
        """Use the file's new *content*. Return why it cannot be used, or "" if it can."""
        try:
            table = parse_keys(content, self._flags)
        except StartupError as error:
            return error.message
        self._take(table)
        logger.info("%s is read again: %d keys of %d tenants", FLAG, len(table.names), len(table.tenants))
        return ""

    def _take(self, table: KeyTable) -> None:
        """Use *table*. Tenants that were in the last table keep their account."""
        accounts = {}
        for name, tenant in table.tenants.items():
            account = self.named.get(name)
            if account is None:
                account = Account(tenant, self._num_processes, self._clock, self._ledger)
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
