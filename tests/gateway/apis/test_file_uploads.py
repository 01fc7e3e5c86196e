"""Files over HTTP as an openai client sees them, and chats that name them."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import scripted
from chats import data_url, random_image
from tables import table

from saccade.gateway.config import GatewayConfig

CONFIG = GatewayConfig(api_keys=("one", "two"), file_store_seconds=1000)


@pytest.fixture(scope="module")
def shared(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl, CONFIG) as gateway:
        yield gateway


@pytest.fixture
def client(shared: scripted.Gateway) -> Iterator[openai.OpenAI]:
    shared.worker.requests.clear()
    shared.answer_two_tokens()
    with shared.client(api_key="one") as made:
        yield made
        for file in made.files.list():
            made.files.delete(file.id)


def png(seed: int = 1) -> bytes:
    buffer = io.BytesIO()
    random_image(70, 50, seed).save(buffer, "PNG")
    return buffer.getvalue()


def upload(client: openai.OpenAI, seed: int = 1, purpose: Any = "vision", **fields: Any) -> Any:
    return client.files.create(file=(f"{seed}.png", png(seed)), purpose=purpose, **fields)


def ask(client: openai.OpenAI, part: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}], max_tokens=5)


def test_file_is_uploaded_read_and_deleted(client: openai.OpenAI) -> None:
    made = upload(client)
    assert (made.object, made.purpose, made.filename, made.status) == ("file", "vision", "1.png", "processed")
    assert made.bytes == len(png())
    assert made.expires_at == made.created_at + 1000
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == png()
    assert [file.id for file in client.files.list()] == [made.id]
    assert client.files.delete(made.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="file_id"):
            gone(made.id)


def test_the_same_image_is_one_file(client: openai.OpenAI, shared: scripted.Gateway) -> None:
    assert upload(client).id == upload(client, purpose="user_data").id != upload(client, 2).id
    assert len(list(client.files.list())) == 2
    num_bytes = len(png(1)) + len(png(2))
    assert num_bytes < shared.metric("saccade_file_store_bytes") < num_bytes + 8192


def test_lists_have_pages(client: openai.OpenAI) -> None:
    made = [upload(client, seed, purpose).id for seed, purpose in enumerate(("vision", "user_data", "vision"))]
    everything = [file.id for file in client.files.list(order="asc")]
    assert sorted(everything) == sorted(made)
    assert [file.id for file in client.files.list(order="desc")] == everything[::-1]
    # The client asks for page after page.
    assert [file.id for file in client.files.list(order="asc", limit=1)] == everything
    assert [file.id for file in client.files.list(purpose="user_data")] == [made[1]]


def test_every_call_about_files_counts_as_a_request(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"k").hexdigest()
    keys.write_text(f'[tenants.acme]\nrequests_per_minute = 9\n[[keys]]\ntenant = "acme"\nsha256 = "{digest}"\n')
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys_file=keys)) as gateway:
        with gateway.client(api_key="k") as client:
            made = upload(client)
        calls = [("GET", ""), ("GET", f"/{made.id}"), ("GET", f"/{made.id}/content"), ("DELETE", f"/{made.id}")]
        answers = [gateway.ask(method, f"/v1/files{path}", Authorization="Bearer k") for method, path in calls]
    assert [answer.status for answer in answers] == [200] * 4
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["7", "6", "5", "4"]


def test_expired_file_is_not_found(client: openai.OpenAI) -> None:
    made = upload(client, expires_after={"anchor": "created_at", "seconds": 60})
    assert made.expires_at == made.created_at + 60
    with pytest.raises(openai.BadRequestError, match="1000"):
        upload(client, expires_after={"anchor": "created_at", "seconds": 1001})


@pytest.mark.parametrize("as_url", [False, True])
def test_a_chat_names_a_file(as_url: bool, client: openai.OpenAI, shared: scripted.Gateway) -> None:
    made = upload(client)
    ask(client, {"type": "image_url", "image_url": {"url": data_url(random_image(70, 50, 1))}})
    ask(
        client,
        {"type": "image_url", "image_url": {"url": made.id}}
        if as_url
        else {"type": "file", "file": {"file_id": made.id}},
    )
    ask(client, {"type": "file", "file": {"file_data": data_url(random_image(70, 50, 1)), "filename": "a.png"}})
    sent, named, inline = shared.worker.requests
    assert sent.token_ids == named.token_ids == inline.token_ids
    # An image is the same however it came, so its caches are too.
    assert sent.media[0].content_hash == named.media[0].content_hash == inline.media[0].content_hash


def asked_by_name(api: str, file_id: str) -> dict[str, Any]:
    """The same request in another API."""
    if api == "/v1/responses":
        return {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": file_id}]}]}
    part = {"type": "image", "source": {"type": "file", "file_id": file_id}}
    return {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("api", "field"),
    [("/v1/responses", "input[0].content[0].file_id"), ("/v1/messages", "messages[0].content[0].source.file_id")],
)
def test_other_apis_name_files(api: str, field: str, client: openai.OpenAI, shared: scripted.Gateway) -> None:
    made = upload(client)
    ask(client, {"type": "file", "file": {"file_id": made.id}})
    assert shared.ask("POST", api, asked_by_name(api, made.id), Authorization="Bearer one").status == 200
    chat, other = shared.worker.requests
    assert chat.token_ids == other.token_ids
    assert chat.media[0].content_hash == other.media[0].content_hash
    for unknown in ("http://127.0.0.1/a.png", f"file-{32 * '1'}"):
        answer = shared.ask("POST", api, asked_by_name(api, unknown), Authorization="Bearer one")
        assert answer.status == 404
        assert field in answer.json["error"]["message"]


def test_token_counts_know_files(client: openai.OpenAI, shared: scripted.Gateway) -> None:
    part = {"type": "file", "file": {"file_id": upload(client).id}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    counted = shared.ask("POST", "/tokenize", body, Authorization="Bearer one").json
    ask(client, part)
    assert counted["tokens"] == shared.worker.requests[0].token_ids


def test_another_tenants_file_is_not_found(client: openai.OpenAI, shared: scripted.Gateway) -> None:
    made = upload(client)
    with shared.client(api_key="two") as other:
        assert list(other.files.list()) == []
        for method in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                method(made.id)
        with pytest.raises(openai.NotFoundError) as refused:
            ask(other, {"type": "file", "file": {"file_id": made.id}})
        assert refused.value.param == "messages[0].content[0].file.file_id"
    assert not shared.worker.requests
    assert client.files.retrieve(made.id) == made


@pytest.mark.parametrize(
    ("file", "purpose", "param"),
    [
        (("a.png", b"no image"), "vision", "file"),
        (("a.txt", b"A text"), "user_data", "file"),
        (("a.png", png()[:20]), "vision", "file"),
        (("a.png", png()), "fine-tune", "purpose"),
    ],
)
def test_invalid_files_are_not_stored(file: Any, purpose: Any, param: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=file, purpose=purpose)
    assert refused.value.param == param
    assert list(client.files.list()) == []


def test_only_forms_are_uploads(shared: scripted.Gateway) -> None:
    assert shared.ask("POST", "/v1/files", {"file": "a"}, Authorization="Bearer one").status == 415
    headers = {"Authorization": "Bearer one", "Content_Type": "multipart/form-data; boundary=xyz"}
    answer = shared.ask("POST", "/v1/files", b"--xyz--\r\n", **headers)
    assert (answer.status, answer.json["error"]["param"]) == (400, "file")


@table("query", ["limit=0", "limit=a", "limit=10001", "order=up", "after=file-1"])
def test_listing_is_checked(query: str, shared: scripted.Gateway) -> None:
    answer = shared.ask("GET", f"/v1/files?{query}", Authorization="Bearer one")
    assert (answer.status, answer.json["error"]["param"]) == (400, query.split("=")[0])


def test_a_gateway_without_a_store(tiny_qwen3_vl: Path) -> None:
    config = replace(CONFIG, api_keys=(), file_store_bytes=0)
    with scripted.running(tiny_qwen3_vl, config) as gateway, gateway.client() as client:
        for refused in (lambda: upload(client), client.files.list, lambda: client.files.retrieve("file-1")):
            with pytest.raises(openai.BadRequestError, match="--file-store-bytes"):
                refused()
        with pytest.raises(openai.BadRequestError, match="--file-store-bytes"):
            ask(client, {"type": "file", "file": {"file_id": f"file-{32 * '1'}"}})
