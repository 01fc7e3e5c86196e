"""Metrics of the tenants of a keys file; their number is bounded by the file."""

from collections.abc import Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.gateway.tenants.api_keys import ApiKeyStore
from saccade.protocol.gateway_calls import TenantUsage

DESCRIPTIONS = {
    "requests": "Ended requests of a tenant, but for those that its limits refused at once and those that got 503.",
    "refused": "Requests of a tenant that one of its limits refused.",
    "prompt_tokens": "Tokens of a tenant's prompts.",
    "cached_tokens": "Tokens of a tenant's prompts that were computed before.",
    "completion_tokens": "Tokens that were generated for a tenant.",
    "picture_bytes": "Bytes of a tenant's encoded images.",
}


class TenantMetrics(Collector):
    """What each tenant has used, and whether the keys file is used as it is now. Nothing without such a file."""

    def __init__(self, api_keys: ApiKeyStore) -> None:
        self._api_keys = api_keys

    def collect(self) -> Iterable[Metric]:
        if not self._api_keys.named:
            return
        for field in msgspec.structs.fields(TenantUsage):
            family = CounterMetricFamily(f"saccade_tenant_{field.name}", DESCRIPTIONS[field.name], labels=["tenant"])
            for name, account in self._api_keys.named.items():
                family.add_metric([name], getattr(account.usage, field.name))
            yield family
        is_current = 0 if self._api_keys.fault else 1
        yield GaugeMetricFamily(
            "saccade_api_keys_file_current", "Whether the keys file is used as it is now.", value=is_current
        )
