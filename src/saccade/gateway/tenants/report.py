"""What operators see of tenants: a report on each, and metrics."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.gateway.tenants.account import Account
from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.metric_registry import filled
from saccade.protocol.gateway_calls import TenantUsage, total

TENANT_LABEL = "tenant"
"""The label of metrics that name a tenant."""

EPOCH = date(1970, 1, 1)
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
    """A keys-file tenant with its usage and its limits. A limit of None means that there is no limit."""

    tenant: str
    group: str
    priority: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    image_bytes_per_minute: int | None
    usage: TenantUsage


def tenant_reports(accounts: Mapping[str, Account], usages: Sequence[Mapping[str, TenantUsage]]) -> list[TenantReport]:
    """Return a report on each of *accounts*; *usages* holds every process's usage by tenant."""
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


class DailyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a *model* on a *day* (UTC).

    *tenant* is None for everybody without a name in the keys file, and *model* is "" for requests without a model.
    """

    day: str
    tenant: str | None
    model: str
    usage: TenantUsage


def daily_usage(rows: Iterable[tuple[bytes, str, int, TenantUsage]], names: Mapping[bytes, str]) -> list[DailyUsage]:
    """Return the usage of *rows*, which have a tenant, a model and a day. *names* has the names of tenants."""
    sums: dict[tuple[int, str | None, str], TenantUsage] = {}
    for tenant, model, day, usage in rows:
        key = (day, names.get(tenant), model)
        sums[key] = total(TenantUsage, [sums.get(key, NO_USAGE), usage])
    return [
        DailyUsage(day=(EPOCH + timedelta(day)).isoformat(), tenant=tenant, model=model, usage=usage)
        for (day, tenant, model), usage in sorted(sums.items(), key=lambda row: (row[0][0], row[0][1] or "", row[0][2]))
    ]


class TenantMetrics(Collector):
    """Collects each tenant's usage, and whether the current keys file is in use.

    Without a keys file, it has no metrics.
    """

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
