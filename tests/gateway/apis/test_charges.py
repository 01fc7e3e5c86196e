"""What the requests of a tenant cost, seen through the gateway."""

import base64
import hashlib
from pathlib import Path

import pdfs
import pytest
import scripted
from waiting import wait_until

from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import TokenDelta

KEY = "sk-" + "k" * 32
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "hi"},
    "/v1/completions": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
}


def keys_file(folder: Path) -> Path:
    """The file of a tenant with two requests a minute."""
    file = folder / "keys.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    file.write_text(f'[tenants.acme]\nrequests_per_minute = 2\n[[keys]]\ntenant = "acme"\nsha256 = "{digest}"\n')
    return file


@pytest.mark.parametrize("stream", [False, True])
def test_requests_without_a_ready_worker_are_not_charged(stream: bool, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    file = keys_file(tmp_path)
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys_file=file, api_keys=("own",))) as gateway:

        def ask(path: str) -> scripted.Answer:
            body = {"model": "tiny", **BODIES[path]} | ({"stream": True} if stream and path != "/tokenize" else {})
            return gateway.ask("POST", path, body, Authorization=f"Bearer {KEY}")

        gateway.worker.become(ready=False)
        for path in (*BODIES, "/tokenize"):
            answer = ask(path)
            assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (503, "2"), path
        gateway.worker.become(ready=True)
        assert [ask("/tokenize").status for _ in range(3)] == [200, 200, 429]
        page = gateway.ask("GET", "/metrics", Authorization="Bearer own").body.decode()
        assert 'saccade_tenant_requests_total{tenant="acme"} 2.0' in page


def test_answer_is_charged_during_the_stream_and_fully_at_its_end(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys_file=keys_file(tmp_path))) as gateway:

        def charged() -> float:
            return gateway.metric("saccade_tenant_completion_tokens_total", tenant="acme")

        gateway.answer_two_tokens()
        gateway.chat_as(KEY)
        assert charged() == 3
        tokens = [TokenDelta("r", [300])] * 70
        gateway.worker.script = [*tokens, 60.0]
        with gateway.client(api_key=KEY) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=100
            )
            wait_until(lambda: charged() >= 3 + 64)
            stream.close()
        wait_until(lambda: charged() == 3 + 70)


def test_pages_of_a_pdf_are_charged_as_one_file(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    file = pdfs.pdf(pdfs.TEXT, pdfs.SQUARE)
    url = f"data:application/pdf;base64,{base64.b64encode(file).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys_file=keys_file(tmp_path))) as gateway:
        gateway.answer_two_tokens()
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = gateway.ask("POST", "/v1/chat/completions", body, Authorization=f"Bearer {KEY}")
        assert len(answer.json["usage"]["prompt_tokens_details"]["images"]) == 2
        assert gateway.metric("saccade_tenant_image_bytes_total", tenant="acme") == len(file)
