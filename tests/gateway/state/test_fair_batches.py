"""Batches of one tenant hold up neither others' batches nor the database."""

import threading
from collections import Counter
from pathlib import Path

import openai
import pytest
from batch_calls import Open, chat, counts, create, ended
from waiting import wait_until

from saccade.errors import WorkerFailed
from saccade.gateway.apis.batches import runner, store
from saccade.gateway.state import batches
from saccade.gateway.tenants.key_table import digest_of

pytestmark = pytest.mark.usefixtures("often")


def test_batches_of_tenants_without_a_key_hold_up_no_others(opening: Open) -> None:  # F11
    with opening(api_keys=("gone",)) as gateway, gateway.client(api_key="gone") as client:
        gateway.worker.script.insert(0, threading.Event())
        for number in range(runner.MAX_BATCHES + 1):
            create(client, [chat(str(number))])
    with opening(api_keys=("one",)) as gateway, gateway.client(api_key="one") as client:
        assert ended(client, create(client, [chat("a")]).id).status == "completed"


def test_one_tenant_leaves_a_batch_to_others(opening: Open) -> None:  # F11
    with opening(batch_concurrency=8) as gateway, gateway.client(api_key="one") as one:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        made = [create(one, [chat(str(number))]).id for number in range(runner.MAX_BATCHES + 1)]
        wait_until(lambda: len(gateway.worker.requests) == runner.MAX_BATCHES - 1)
        with gateway.client(api_key="two") as two:
            create(two, [chat("a")])
            wait_until(lambda: len(gateway.worker.requests) == runner.MAX_BATCHES)
            assert sorted(Counter(request.salt for request in gateway.worker.requests).values()) == [1, 3]
            may_answer.set()
            assert {ended(one, batch_id).status for batch_id in made} == {"completed"}


def test_a_limited_tenant_keeps_no_places(opening: Open, tmp_path: Path) -> None:  # F11
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "[tenants.slow]\nrequests_per_minute = 3\n"
        f'[[keys]]\ntenant = "slow"\nsha256 = "{digest_of(b"slow").hex()}"\n'
        f'[tenants.fast]\n[[keys]]\ntenant = "fast"\nsha256 = "{digest_of(b"fast").hex()}"\n'
    )
    with opening(api_keys=(), api_keys_file=keys) as gateway:
        # Two calls, and one answer; the next one is 20 s later.
        with gateway.client(api_key="slow") as slow:
            create(slow, [chat(str(number)) for number in range(10)])
        wait_until(lambda: len(gateway.worker.requests) == 1)
        with gateway.client(api_key="fast") as fast:
            assert ended(fast, create(fast, [chat(str(number)) for number in range(4)]).id).status == "completed"
        assert len(gateway.worker.requests) == 1 + 4


def test_a_lapsed_lease_does_not_double_the_work(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an outage of the database: the gateway itself finds its batch without a lease."""
    monkeypatch.setattr(store, "LEASE_SECONDS", -10)
    with opening() as gateway, gateway.client(api_key="one") as client:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        batch = create(client, [chat(str(number)) for number in range(4)])
        wait_until(lambda: len(gateway.worker.requests) == 2)
        threading.Event().wait(0.5)
        may_answer.set()
        assert counts(ended(client, batch.id)) == (4, 4, 0)
        assert len(gateway.worker.requests) == 4


def test_a_request_whose_worker_fails_is_sent_again(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        answer = list(gateway.worker.script)
        gateway.worker.script[:] = [answer[0], WorkerFailed("The worker failed.")]
        batch = create(client, [chat("a")])
        wait_until(lambda: len(gateway.worker.requests) >= 1)
        gateway.worker.script[:] = answer
        assert counts(ended(client, batch.id)) == (1, 1, 0)
        gateway.worker.script[:] = [answer[0], WorkerFailed("The worker failed.")]
        assert counts(ended(client, create(client, [chat("a")]).id)) == (1, 0, 1)


def test_a_tenant_has_a_bounded_number_of_batches(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:  # F11
    monkeypatch.setattr(store, "MAX_OPEN", 2)
    monkeypatch.setattr(batches, "MAX_ENDED", 2)
    with opening() as gateway, gateway.client(api_key="one", max_retries=0) as client:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        made = [create(client, [chat(str(number))]).id for number in range(2)]
        with pytest.raises(openai.RateLimitError, match="have not ended"):
            create(client, [chat("a")])
        may_answer.set()
        for batch_id in made:
            ended(client, batch_id)
        made.append(ended(client, create(client, [chat("a")]).id).id)
        assert [batch.id for batch in client.batches.list()] == made[:0:-1]


def test_answers_that_cannot_be_kept_fail_the_batch(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("they would fill the memory")

    with opening() as gateway, gateway.client(api_key="one") as client:
        monkeypatch.setattr(batches, "answer_bytes", lambda *_: 1 << 40)
        monkeypatch.setattr(batches, "answers_of", read)
        batch = ended(client, create(client, [chat("a")]).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "output_too_large"
        assert "--state-tenant-bytes" in (batch.errors.data[0].message or "")
