"""Files and responses in a database: over a restart, from several gateways, and while the database is away."""

import contextlib
import hashlib
import io
import json
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import postgres
import pytest
import scripted
from chats import data_url, random_image
from waiting import wait_until

from saccade.errors import StartupError
from saccade.gateway.config import GatewayConfig
from saccade.gateway.state import sqlite
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.sqlite import FILE_NAME
from saccade.gateway.state.state import State
from saccade.gateway.tenants import shared_limits

CONFIG = GatewayConfig(api_keys=("one", "two"))
Open = Callable[..., Any]


@pytest.fixture
def opening(new_location: Callable[[], str], tiny_qwen3_vl: Path, tmp_path: Path) -> Open:
    """Runs gateways over one new database."""
    settings = StateSettings(new_location(), tmp_path / "key")

    @contextmanager
    def opened(**fields: Any) -> Iterator[scripted.Gateway]:
        of_state = {name: fields.pop(name) for name in tuple(fields) if name in StateSettings.__dataclass_fields__}
        config = replace(CONFIG, state=replace(settings, **of_state), **fields)
        with scripted.running(tiny_qwen3_vl, config) as gateway:
            gateway.answer_two_tokens()
            yield gateway

    return opened


def png(seed: int = 1) -> bytes:
    buffer = io.BytesIO()
    random_image(70, 50, seed).save(buffer, "PNG")
    return buffer.getvalue()


def upload(client: openai.OpenAI, seed: int = 1) -> str:
    return client.files.create(file=(f"{seed}.png", png(seed)), purpose="vision").id


def respond(client: openai.OpenAI, previous: str | None = None, file: str | None = None) -> Any:
    part: Any = {"type": "input_text", "text": "hi"}
    if file is not None:
        part = {"type": "input_image", "file_id": file}
    return client.responses.create(
        model="tiny", input=[{"role": "user", "content": [part]}], previous_response_id=previous or openai.omit
    )


def test_files_and_conversations_outlive_the_gateway(opening: Open) -> None:  # F20
    with opening() as gateway, gateway.client(api_key="one") as client:
        file = upload(client)
        image: Any = {"type": "input_image", "image_url": data_url(random_image(70, 50, 1))}
        content: Any = [{"role": "user", "content": [image, {"type": "input_text", "text": "What is it?"}]}]
        first = client.responses.create(model="tiny", input=content)
        second = respond(client, first.id, file)
        assert second.to_dict()["store"] is True
    with opening() as gateway, gateway.client(api_key="one") as client:
        assert [one.id for one in client.files.list()] == [file]
        assert client.files.content(file).read() == png()
        assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
        third = respond(client, second.id)
        # The same as if the client had sent everything.
        answers: Any = [item.to_dict() for item in (*first.output, *second.output)]
        shown: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": file}]}]
        asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        whole = client.responses.create(
            model="tiny", input=[*content, answers[0], *shown, answers[1], *asked], store=False
        )
        assert third.usage == whole.usage
        assert gateway.worker.requests[-1].token_ids == gateway.worker.requests[-2].token_ids
        client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as lost:
            respond(client, third.id)
        assert lost.value.code == "previous_response_not_found"


def test_another_tenant_finds_nothing(opening: Open) -> None:  # F11
    with opening() as gateway, gateway.client(api_key="one") as one, gateway.client(api_key="two") as two:
        file, response = upload(one), respond(one).id
        for find in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError, match="file_id"):
                find(file)
        for read in (two.responses.retrieve, two.responses.delete):
            with pytest.raises(openai.NotFoundError):
                read(response)
        with pytest.raises(openai.BadRequestError):
            respond(two, response)
        assert list(two.files.list()) == []
        assert [known.id for known in one.files.list()] == [file]


def test_gateways_over_one_database_share_files_and_conversations(opening: Open) -> None:
    with opening() as left, opening() as right, left.client(api_key="one") as one, right.client(api_key="one") as two:
        file = upload(one)
        first = respond(one, file=file)
        second = respond(two, first.id, file)
        assert respond(one, second.id).status == "completed"
        # Both have the file in memory. Once it is deleted, neither serves it.
        assert two.files.delete(file).deleted
        for client in (one, two):
            with pytest.raises(openai.NotFoundError):
                client.files.content(file)
            with pytest.raises(openai.NotFoundError):
                respond(client, file=file)


@pytest.mark.parametrize("fields", [{"max_tenant_bytes": 5000}, {"max_bytes": 5000}])
def test_a_file_over_the_quota_is_refused(fields: dict[str, int], opening: Open) -> None:
    with opening(**fields) as gateway, gateway.client(api_key="one") as client:
        with pytest.raises(openai.BadRequestError, match="--state-tenant-bytes"):
            upload(client)
        assert list(client.files.list()) == []


def test_a_limit_holds_over_gateways(
    opening: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # F11, F21
    monkeypatch.setattr(shared_limits, "DRAW_SECONDS", 600.0)  # the machine may be slow
    digest = hashlib.sha256(b"acme's").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[tenants.acme]\nrequests_per_minute = 6\n[[keys]]\ntenant = "acme"\nsha256 = "{digest}"\n[tenants.b]\n'
    )
    with opening(api_keys_file=keys) as left, opening(api_keys_file=keys) as right:
        answers = [gateway.chat_as("acme's") for _ in range(10) for gateway in (left, right)]
        num_good = sum(answer.status == 200 for answer in answers)
        assert 6 <= num_good <= 12  # a slow machine refills it meanwhile
        last = answers[-1]
        if last.status == 429:
            assert int(last.headers["retry-after"]) <= 10
        assert last.headers["x-ratelimit-limit-requests"] == "6"
        assert left.metric("saccade_state_local_limits") == 0


async def test_a_database_of_another_key_is_refused(new_location: Callable[[], str], tmp_path: Path) -> None:
    location = new_location()
    for name in ("first", "second", "first"):
        state = State.of_settings(StateSettings(location, tmp_path / name), tenant_files=1)
        assert state is not None
        refusal = pytest.raises(StartupError, match="another key") if name == "second" else contextlib.nullcontext()
        with refusal:
            await state.start()
        await state.close()


async def test_a_database_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    url = f"postgresql://nobody@/none?host={tmp_path}"
    state = State.of_settings(StateSettings(url, tmp_path / "key"), tenant_files=1)
    assert state is not None
    with pytest.raises(StartupError, match="cannot be opened"):
        await state.start()
    await state.close()


def test_postgresql_needs_a_key_file() -> None:
    with pytest.raises(StartupError, match="--state-key-file"):
        StateSettings("postgresql://host/database")


def check_away(gateway: scripted.Gateway, client: openai.OpenAI, first: str, known: str) -> None:
    """Check the answers while nothing can be stored."""
    with pytest.raises(openai.InternalServerError) as refused:
        upload(client, 2)
    assert (refused.value.code, refused.value.response.headers["retry-after"]) == ("store_unavailable", "1")
    asked = {"model": "tiny", "input": "hi"}
    for stream in (False, True):
        answer = gateway.ask("POST", "/v1/responses", {**asked, "stream": stream}, Authorization="Bearer one")
        assert answer.status == 200
        assert "not stored" in answer.headers["x-saccade-warning"]
        last = answer.body.rpartition(b"data: ")[2]
        response = json.loads(last)["response"] if stream else json.loads(last)
        assert (response["status"], response["store"]) == ("completed", False)
    # Chats do not need the database, nor does a file that is still in memory.
    assert gateway.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": [
        {"role": "user", "content": [{"type": "file", "file": {"file_id": known}}]}
    ]}, Authorization="Bearer one").status == 200  # fmt: skip
    assert gateway.metric("saccade_state_up") == 0
    assert gateway.metric("saccade_state_failures_total") > 0
    assert gateway.ask("GET", "/ready").status == 200


def check_back(client: openai.OpenAI, first: str, known: str) -> None:
    """Check that everything is there, as soon as the gateway has tried the database again."""

    def is_back() -> bool:
        try:
            return bool(upload(client, 2) and client.files.content(known).read())
        except openai.InternalServerError:
            return False

    wait_until(is_back)
    assert client.files.content(known).read() == png()
    assert respond(client, first, known).to_dict()["store"] is True


def test_while_postgresql_is_stopped(tiny_qwen3_vl: Path, tmp_path: Path) -> None:  # F11, F20
    if not postgres.IS_INSTALLED:
        pytest.skip("needs PostgreSQL's programs, as in Debian's package postgresql")
    with postgres.running() as server:
        config = replace(CONFIG, state=StateSettings(server.new_schema(), tmp_path / "key"))
        with scripted.running(tiny_qwen3_vl, config) as gateway, gateway.client(api_key="one") as client:
            gateway.answer_two_tokens()
            known, first = upload(client), respond(client).id
            for how in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
                server.stop(how)
                check_away(gateway, client, first, known)
                for ask in (lambda: respond(client, first), lambda: client.responses.retrieve(first)):
                    with pytest.raises(openai.InternalServerError) as refused:
                        ask()
                    assert refused.value.code == "store_unavailable"
                for read in (client.files.list, lambda: client.files.delete(known)):
                    with pytest.raises(openai.InternalServerError):
                        read()
                server.start()
                check_back(client, first, known)


def test_while_another_process_locks_sqlite(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3_vl: Path, tmp_path: Path
) -> None:  # F11, F20
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.05)
    config = replace(CONFIG, state=StateSettings(str(tmp_path / "state")))
    with scripted.running(tiny_qwen3_vl, config) as gateway, gateway.client(api_key="one") as client:
        gateway.answer_two_tokens()
        known, first = upload(client), respond(client).id
        other = sqlite3.connect(tmp_path / "state" / FILE_NAME, isolation_level=None)
        other.execute("begin immediate")
        check_away(gateway, client, first, known)
        # Reading goes on.
        assert respond(client, first).to_dict()["store"] is False
        assert [file.id for file in client.files.list()] == [known]
        other.execute("rollback")
        other.close()
        check_back(client, first, known)
