"""What a tenant may use in a minute, by a clock that the test moves."""

import contextlib
from collections.abc import Callable

import pytest
from tables import table

from saccade.errors import Draining, RateLimitExceeded, ServiceError, WorkerFailed, WorkerUnavailable
from saccade.gateway.tenants.account import Account, Limits, Tenant, duration
from saccade.protocol.gateway_calls import TenantUsage


class Clock:
    """Seconds, which only the test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def account(clock: Clock, num_processes: int = 1, **limits: int) -> Account:
    return Account(Tenant(name="acme", limits=Limits(**limits)), num_processes, clock)


def refused(use: Callable[[], None]) -> int:
    """After how many seconds the refusal says to come again."""
    with pytest.raises(RateLimitExceeded) as error:
        use()
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    assert "'acme'" in error.value.message
    assert f"again in {error.value.retry_after_seconds} s" in error.value.message
    return error.value.retry_after_seconds


def serve(tenant: Account, error: Exception | None = None) -> None:
    """Serve a request, or fail with *error*."""
    with contextlib.suppress(ServiceError), tenant.request():
        if error is not None:
            raise error


def shown(tenant: Account) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in tenant.headers()}


def test_requests_of_a_minute_may_come_at_once_and_then_evenly() -> None:
    clock = Clock()
    tenant = account(clock, requests=3)
    for _ in range(3):
        serve(tenant)
    assert refused(lambda: serve(tenant)) == 20
    clock.seconds += 19.5
    assert refused(lambda: serve(tenant)) == 1  # rounded up
    clock.seconds += 0.5
    serve(tenant)
    assert refused(lambda: serve(tenant)) == 20
    clock.seconds += 1000  # a bucket holds no more than a minute's worth
    for _ in range(3):
        serve(tenant)
    assert refused(lambda: serve(tenant)) == 20
    assert tenant.usage == TenantUsage(requests=7, refused=4)


def test_requests_that_no_worker_could_serve_are_not_charged() -> None:
    tenant = account(Clock(), requests=2)
    for _ in range(5):
        serve(tenant, WorkerUnavailable("No worker is ready."))
        serve(tenant, Draining("The server is shutting down."))
    assert tenant.usage == TenantUsage()
    assert shown(tenant)["x-ratelimit-remaining-requests"] == "2"
    serve(tenant, WorkerFailed("The engine failed."))  # a worker worked on it
    serve(tenant)
    assert refused(lambda: serve(tenant)) == 30
    assert tenant.usage == TenantUsage(requests=2, refused=1)


def test_tokens_of_prompts_and_answers_count_together_and_debts_are_paid_first() -> None:
    clock = Clock()
    tenant = account(clock, tokens=60)
    serve(tenant)
    tenant.use_prompt(50)
    serve(tenant)  # 10 are left, so a prompt of any length is taken
    tenant.use_prompt(40)
    tenant.use_answer(9)  # what runs goes on
    assert refused(lambda: serve(tenant)) == 40  # -39 to 1
    assert refused(lambda: tenant.use_prompt(1)) == 40  # a request that came in before
    clock.seconds += 40
    serve(tenant)
    tenant.use_prompt(1)
    tenant.use_cached(1)
    assert tenant.usage == TenantUsage(requests=3, refused=2, prompt_tokens=91, completion_tokens=9, cached_tokens=1)


def test_bytes_of_images() -> None:
    clock = Clock()
    tenant = account(clock, image_bytes=600)
    serve(tenant)
    tenant.use_images(650)
    assert refused(lambda: tenant.use_images(1)) == 6  # -50 to 1, 10 a second
    assert refused(lambda: tenant.begin_images(2)) == 6
    serve(tenant)  # text needs none
    tenant.begin_images(0)
    tenant.use_images(0)
    assert tenant.usage.image_bytes == 650
    assert shown(tenant) == {}


def test_without_limits_everything_is_counted_and_nothing_refused() -> None:
    tenant = account(Clock())
    for _ in range(1000):
        serve(tenant)
        tenant.use_prompt(1 << 40)
        tenant.use_images(1 << 40)
    assert tenant.usage.requests == 1000
    assert shown(tenant) == {}


def test_headers_are_those_of_openai() -> None:
    clock = Clock()
    tenant = account(clock, requests=60, tokens=6000)
    serve(tenant)
    tenant.use_prompt(7225)
    assert shown(tenant) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m12.25s",
    }
    clock.seconds += 0.75
    assert shown(tenant)["x-ratelimit-reset-requests"] == "250ms"
    assert shown(tenant)["x-ratelimit-remaining-requests"] == "59"  # three quarters of one are none


@table(
    ("seconds", "text"), [(0, "0s"), (0.0001, "1ms"), (0.9999, "1s"), (8.64, "8.64s"), (59.9999, "1m0s"), (360, "6m0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_each_process_has_its_part_rounded_up() -> None:
    tenant = account(Clock(), 4, requests=5, tokens=400)
    assert shown(tenant)["x-ratelimit-limit-requests"] == "2"
    assert shown(tenant)["x-ratelimit-limit-tokens"] == "100"
    assert "x-ratelimit-limit-tokens" not in shown(account(Clock(), 4, requests=5))


def test_changed_limits_keep_the_remaining_budget() -> None:
    clock = Clock()
    tenant = account(clock, requests=10, tokens=100)
    tenant.use_prompt(95)
    tenant.change(Tenant(name="acme", limits=Limits(requests=4, tokens=1000)))
    assert (shown(tenant)["x-ratelimit-remaining-requests"], shown(tenant)["x-ratelimit-remaining-tokens"]) == (
        "4",
        "5",
    )
    clock.seconds += 6
    assert shown(tenant)["x-ratelimit-remaining-tokens"] == "105"
    tenant.change(Tenant(name="acme"))
    assert shown(tenant) == {}
    tenant.use_prompt(1000)
    tenant.change(Tenant(name="acme", limits=Limits(tokens=10)))
    assert shown(tenant)["x-ratelimit-remaining-tokens"] == "10"
