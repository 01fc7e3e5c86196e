"""Usage is collected by tenant, model and day; beyond a bound, whose it is is not kept."""

import pytest

from saccade.gateway import usage_log
from saccade.gateway.usage_log import DAY_SECONDS, UNATTRIBUTED, UsageKey, UsageLog
from saccade.protocol.gateway_calls import TenantUsage


def test_usage_is_collected_by_tenant_model_and_day() -> None:
    seconds = 3.0 * DAY_SECONDS - 1
    log = UsageLog(lambda: seconds)
    log.row(b"t", "a").requests += 1
    log.row(b"t", "a").requests += 1
    log.row(b"t", "b").prompt_tokens += 5
    seconds += 1
    log.row(b"t", "a").requests += 1
    assert log.take() == {
        UsageKey(b"t", "a", 2): TenantUsage(requests=2),
        UsageKey(b"t", "b", 2): TenantUsage(prompt_tokens=5),
        UsageKey(b"t", "a", 3): TenantUsage(requests=1),
    }
    assert log.take() == {}


def test_beyond_the_bound_usage_is_unattributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "MAX_ROWS", 3)
    log = UsageLog(lambda: 0.0)
    for number in range(10):
        log.row(b"%d" % number, "").requests += 1
    log.row(b"0", "").requests += 1
    assert len(log) == 4
    rows = log.take()
    assert rows[UsageKey(b"0", "", 0)].requests == 2
    assert rows[UsageKey(UNATTRIBUTED, "", 0)].requests == 7
