"""Batches as OpenAI's SDK asks for them: created from a file, answered, listed, cancelled, and taken over."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoded
import openai
import pytest
import scripted
from batch_calls import CHATS, CONFIG, Open, chat, content, counts, create, ended, upload
from chats import data_url, random_image
from waiting import wait_until

from saccade.gateway.apis.batches import store
from saccade.gateway.state.settings import StateSettings

pytestmark = pytest.mark.usefixtures("often")


def test_a_batch_is_answered(opening: Open) -> None:  # F13
    image = [{"type": "image_url", "image_url": {"url": data_url(random_image(70, 50, 1))}}]
    with opening() as gateway, gateway.client(api_key="one") as client:
        batch = create(client, [chat("a"), chat("b", image), chat("c", model="none")], metadata={"name": "first"})
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"name": "first"})
        batch = ended(client, batch.id)
        assert (batch.status, counts(batch), batch.errors) == ("completed", (3, 2, 1), None)
        assert batch.expires_at == batch.created_at + 24 * 3600
        assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        answers = content(client, batch.output_file_id)
        assert set(answers) == {"a", "b"}
        assert answers["a"]["response"]["status_code"] == 200
        assert answers["a"]["response"]["body"]["choices"][0]["finish_reason"] == "stop"
        assert answers["a"]["error"] is None
        [refused] = content(client, batch.error_file_id).values()
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("c", 404)
        assert refused["response"]["body"]["error"]["code"] == "model_not_found"
        assert [one.id for one in client.batches.list()] == [batch.id]
    with opening() as gateway, gateway.client(api_key="one") as client:
        assert client.batches.retrieve(batch.id) == batch


def test_lines_that_are_wrong_go_to_the_error_file(opening: Open) -> None:
    lines = [
        chat("a"),
        "no json",
        chat("a"),
        chat("streamed", stream=True),
        chat("elsewhere", url="/v1/embeddings"),
        {**chat("got"), "method": "GET"},
        {**chat("listed"), "body": []},
        {**chat("numbered"), "custom_id": 7},
        "",
    ]
    with opening() as gateway, gateway.client(api_key="one") as client:
        batch = ended(client, create(client, lines).id)
        assert counts(batch) == (8, 1, 7)
        assert batch.error_file_id is not None
        errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
        assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
            (None, "invalid_line"),
            ("a", "duplicate_custom_id"),
            ("streamed", "unsupported_parameter"),
            ("elsewhere", "invalid_url"),
            ("got", "invalid_line"),
            ("listed", "invalid_line"),
            (None, "invalid_line"),
        ]
        assert len(gateway.worker.requests) == 1


@pytest.mark.parametrize("encode", [lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n")])
def test_files_of_other_editors(encode: Callable[[bytes], bytes], opening: Open) -> None:
    content = encode(b"\n\n".join(json.dumps(chat(name)).encode() for name in "ab"))
    with opening() as gateway, gateway.client(api_key="one") as client:
        file = client.files.create(file=("requests.jsonl", content), purpose="batch").id
        batch = ended(client, client.batches.create(input_file_id=file, endpoint=CHATS, completion_window="24h").id)
        assert counts(batch) == (2, 2, 0)


def test_model_and_usage_are_those_of_the_requests(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        batch = ended(client, create(client, [chat("a"), chat("b")]).id)
        assert batch.output_file_id is not None
        answers = content(client, batch.output_file_id).values()
        usages = [openai.types.CompletionUsage(**one["response"]["body"]["usage"]) for one in answers]
        assert batch.usage is not None
        assert batch.usage.input_tokens == sum(usage.prompt_tokens for usage in usages) > 0
        assert batch.usage.output_tokens == sum(usage.completion_tokens for usage in usages) > 0
        assert batch.usage.total_tokens == sum(usage.total_tokens for usage in usages)
        cached = [usage.prompt_tokens_details for usage in usages]
        assert batch.usage.input_tokens_details.cached_tokens == sum(one.cached_tokens or 0 for one in cached if one)
        assert batch.model == "tiny"
        assert ended(client, create(client, [chat("a"), chat("b", model="none")]).id).model is None


def test_a_field_without_effect_is_named_in_the_output(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        batch = ended(client, create(client, [chat("a", invented=1), chat("b")]).id)
        answers = content(client, batch.output_file_id)
        assert "invented" in answers["a"]["response"]["warning"]
        assert "warning" not in answers["b"]["response"]


def test_output_files_expire_as_asked(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        batch = ended(
            client, create(client, [chat("a")], output_expires_after={"anchor": "created_at", "seconds": 4000}).id
        )
        assert batch.output_file_id is not None
        file = client.files.retrieve(batch.output_file_id)
        assert (file.expires_at or 0) - file.created_at == 4000
        for expiry in ({"anchor": "created_at", "seconds": 0}, {"anchor": "last_used_at", "seconds": 1}):
            with pytest.raises(openai.BadRequestError, match="output_expires_after"):
                create(client, [chat("a")], output_expires_after=expiry)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})],
)
def test_other_endpoints(endpoint: str, body: dict[str, str], opening: Open) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
    with opening() as gateway, gateway.client(api_key="one") as client:
        batch = ended(client, create(client, [line], endpoint).id)
        assert counts(batch) == (1, 1, 0)
        assert content(client, batch.output_file_id)["a"]["response"]["status_code"] == 200


def test_what_cannot_be_a_batch_is_refused_by_name(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client, gateway.client(api_key="two") as other:
        file = upload(client, [chat("a")])
        fields: dict[str, Any] = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
        for name, value in (
            ("endpoint", "/v1/embeddings"),
            ("completion_window", "1h"),
            ("metadata", {"a": "b" * 513}),
        ):
            with pytest.raises(openai.BadRequestError, match=name):
                client.batches.create(**{**fields, name: value})
        with pytest.raises(openai.NotFoundError, match="input_file_id"):
            client.batches.create(**{**fields, "input_file_id": "file-none"})
        with pytest.raises(openai.NotFoundError, match="input_file_id"):
            other.batches.create(**fields)
        batch = ended(client, client.batches.create(**fields).id)
        for find in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                find(batch.id)
        assert list(other.batches.list()) == []
        empty = ended(client, create(client, ["", " "]).id)
        assert empty.status == "failed"
        assert empty.errors is not None
        assert empty.errors.data is not None
        assert empty.errors.data[0].code == "empty_file"


def test_a_batch_is_created_by_an_encoded_body(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        body = json.dumps({"input_file_id": upload(client, [chat("a")]), "endpoint": CHATS, "completion_window": "24h"})
        for coding, encode in encoded.ENCODERS.values():
            sent = encode(b"\xef\xbb\xbf" + body.encode())
            answer = gateway.ask("POST", "/v1/batches", sent, Content_Encoding=coding, Authorization="Bearer one")
            assert answer.status == 200, answer.body


def test_batches_are_listed_in_pages(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        made = [create(client, [chat(str(number))]).id for number in range(3)]
        page = client.batches.list(limit=2)
        assert ([batch.id for batch in page.data], page.has_more) == (made[:0:-1], True)
        assert [batch.id for batch in client.batches.list(limit=1)] == made[::-1]
        with pytest.raises(openai.BadRequestError, match="after"):
            client.batches.list(after="batch_none")


def test_a_cancelled_batch_begins_no_further_request(opening: Open) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        batch = create(client, [chat(str(number)) for number in range(20)])
        wait_until(lambda: len(gateway.worker.requests) == 2)  # --batch-concurrency
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        # In the next second, the time of the cancellation is the same.
        threading.Event().wait(1.1)
        assert client.batches.retrieve(batch.id).cancelling_at == cancelled.cancelling_at
        may_answer.set()
        batch = ended(client, batch.id)
        assert (batch.status, batch.cancelling_at) == ("cancelled", cancelled.cancelling_at)
        assert (batch.cancelled_at or 0) > (batch.cancelling_at or 0)
        assert len(content(client, batch.output_file_id)) == 2
        assert len(gateway.worker.requests) == 2
        assert client.batches.cancel(batch.id).status == "cancelled"


def test_an_expired_batch_says_what_was_not_answered(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with opening() as gateway, gateway.client(api_key="one") as client:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        batch = create(client, [chat(str(number)) for number in range(5)])
        wait_until(lambda: len(gateway.worker.requests) == 2)
        assert batch.expires_at is not None
        monkeypatch.setattr(store.BatchStore, "now", lambda _, later=batch.expires_at: later)
        may_answer.set()
        batch = ended(client, batch.id)
        assert (batch.status, counts(batch)) == ("expired", (5, 2, 3))
        errors = content(client, batch.error_file_id).values()
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def test_another_gateway_goes_on_without_asking_answered_lines_again(
    opening: Open, monkeypatch: pytest.MonkeyPatch
) -> None:  # F20
    with opening() as left, left.client(api_key="one") as client:
        batch = create(client, [chat(str(number)) for number in range(6)])
        may_answer = threading.Event()
        wait_until(lambda: len(left.worker.requests) >= 1)
        left.worker.script.insert(0, may_answer)
        wait_until(lambda: counts(client.batches.retrieve(batch.id))[1] >= 1)
        num_left = len(left.worker.requests)
    with opening() as right, right.client(api_key="one") as client:
        batch = ended(client, batch.id)
        assert (batch.status, counts(batch)) == ("completed", (6, 6, 0))
        assert set(content(client, batch.output_file_id)) == {str(number) for number in range(6)}
        # Those in flight at the end of the first gateway, at most --batch-concurrency, were asked once more.
        assert num_left + len(right.worker.requests) <= 6 + 2


def test_the_batch_of_a_killed_gateway_goes_on_elsewhere(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:  # F20
    async def keep(*_: object) -> None:
        """As if the gateway were killed: it does not give back its lease."""

    monkeypatch.setattr(store, "LEASE_SECONDS", 2)
    monkeypatch.setattr(store.BatchStore, "give_back", keep)
    with opening() as left, left.client(api_key="one") as client:
        left.worker.script.insert(0, threading.Event())
        batch = create(client, [chat(str(number)) for number in range(4)])
        wait_until(lambda: len(left.worker.requests) == 2)
    with opening() as right, right.client(api_key="one") as client:
        batch = ended(client, batch.id)
        assert (batch.status, counts(batch)) == ("completed", (4, 4, 0))
        assert len(right.worker.requests) == 4


def test_gateways_do_not_work_on_the_same_batch(opening: Open) -> None:
    with opening() as left, opening() as right, left.client(api_key="one") as client:
        batch = create(client, [chat(str(number)) for number in range(8)])
        assert ended(client, batch.id).status == "completed"
        assert len(left.worker.requests) + len(right.worker.requests) == 8
        with right.client(api_key="one") as other:
            assert other.batches.retrieve(batch.id).status == "completed"


def test_batches_may_take_half_of_the_quota(
    new_location: Callable[[], str], tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    settings = StateSettings(new_location(), tmp_path / "key", max_tenant_bytes=4000)
    with scripted.running(tiny_qwen3_vl, replace(CONFIG, state=settings)) as gateway:
        gateway.answer_two_tokens()
        with gateway.client(api_key="one") as client:
            with pytest.raises(openai.BadRequestError, match="--state-tenant-bytes"):
                create(client, [chat(str(number)) for number in range(20)])
            assert ended(client, create(client, [chat("a")]).id).status == "completed"


def test_interactive_requests_go_first(opening: Open) -> None:  # F11
    with opening(batch_concurrency=16) as gateway, gateway.client(api_key="one") as client:
        may_answer = threading.Event()
        gateway.worker.script.insert(0, may_answer)
        batch = create(client, [chat(str(number)) for number in range(40)])
        dispatcher = gateway.application.pipeline.dispatcher
        # Every request of the batch that is in flight is at the worker, or waits.
        wait_until(lambda: len(gateway.worker.requests) + dispatcher.num_waiting == 16)
        assert dispatcher.num_waiting
        asking = threading.Thread(target=lambda: gateway.chat_as("two"))
        num_before = len(gateway.worker.requests)
        num_waiting = dispatcher.num_waiting
        asking.start()
        wait_until(lambda: dispatcher.num_waiting == num_waiting + 1 or len(gateway.worker.requests) > num_before)
        may_answer.set()
        asking.join()
        tenant = gateway.worker.requests[num_before].salt
        assert tenant != gateway.worker.requests[0].salt  # the first that began was the interactive one
        assert ended(client, batch.id).status == "completed"


def test_without_a_database_the_flag_is_named(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl) as gateway, gateway.client() as client:
        for call in (client.batches.list, lambda: client.batches.retrieve("batch_a")):
            with pytest.raises(openai.BadRequestError, match="--state"):
                call()
