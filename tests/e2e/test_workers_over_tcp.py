"""`saccade worker` and `saccade gateway` as two programs over TCP, with the files of docs/operations.md."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from certificates import Files, files
from server import Server, free_port, program

from saccade.connectors.context import ClientContext
from saccade.connectors.native.client import WorkerClient
from saccade.protocol.kv_events import BlockStored, KvEvents

__all__ = ["files"]

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def fleet(files: Files, tiny_qwen3_vl: Path) -> Iterator[tuple[Server, str]]:
    """A gateway and the address of its worker, which asks for a token and certificates and tells token ids."""
    names = ("worker.token", "worker.pem", "worker.key", "ca.pem", "gateway.pem", "gateway.key")
    token, certificate, key, authority, own, own_key = (str(files.folder / name) for name in names)
    worker_port, port = free_port(), free_port()
    address = f"grpcs://localhost:{worker_port}"
    asked = ("--worker-token-file", token, "--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", authority)
    shown = ("--worker-token-file", token, "--worker-tls-ca", authority, "--worker-tls-cert", own, "--worker-tls-key")
    worker = ("worker", str(tiny_qwen3_vl), "--port", str(worker_port), "--max-model-len", "512", *asked)
    gateway = ("gateway", "--worker-url", address, "--port", str(port), "--decode-processes", "1", *shown, own_key)
    with program(*worker, "--kv-events-token-ids"), program(*gateway) as process:
        server = Server(port, process)
        server.wait_until_ready()
        yield server, address


def ask(server: Server) -> None:
    body = {"model": server.name, "messages": [{"role": "user", "content": "words " * 40}], "max_tokens": 2}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] >= 1


def test_chat_is_answered_over_tls_with_token_and_certificate(fleet: tuple[Server, str]) -> None:
    ask(fleet[0])


async def first(feed: AsyncIterator[KvEvents]) -> KvEvents:
    async with asyncio.timeout(60):
        return await anext(feed)


def test_events_have_token_ids_if_the_operator_allows_it(fleet: tuple[Server, str], files: Files) -> None:
    server, address = fleet
    ask(server)

    async def watch() -> KvEvents:
        client = WorkerClient(address, ClientContext(credentials=files.credentials(token=True, mutual=True)))
        await client.start()
        try:
            while not client.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            async with contextlib.aclosing(client.kv_events(blocks=True)) as feed:
                return await first(feed)
        finally:
            await client.close()

    stored = [event for event in asyncio.run(watch()).events if isinstance(event, BlockStored)]
    assert stored
    assert all(event.token_ids for event in stored)
