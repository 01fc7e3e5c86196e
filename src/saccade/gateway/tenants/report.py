"""What the operator is shown of each tenant of the keys file."""

from collections.abc import Mapping, Sequence

import msgspec

from saccade.gateway.tenants.account import Account
from saccade.protocol.gateway_calls import TenantUsage

NO_USAGE = TenantUsage()


class TenantReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant of the keys file: its limits, None where there is none, and what it has used."""

    tenant: str
    group: str
    priority: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    picture_bytes_per_minute: int | None
    usage: TenantUsage


def tenant_reports(accounts: Mapping[str, Account], usages: Sequence[Mapping[str, TenantUsage]]) -> list[TenantReport]:
    """Return a report on the tenant of each of *accounts*; *usages* are those of every process, by name."""
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
                picture_bytes_per_minute=tenant.limits.picture_bytes,
                usage=_together([of_process.get(name, NO_USAGE) for of_process in usages]),
            )
        )
    return reports


def _together(usages: Sequence[TenantUsage]) -> TenantUsage:
    """Return the sum of *usages*."""
    names = [field.name for field in msgspec.structs.fields(TenantUsage)]
    return TenantUsage(**{name: sum(getattr(usage, name) for usage in usages) for name in names})
