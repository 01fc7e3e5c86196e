"""Workers over TCP: who gets in with what, and what those outside see."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from certificates import Files, files
from fronts import Front
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tables import table
from waiting import until

from saccade.connectors.context import ClientContext
from saccade.connectors.native.client import WorkerClient
from saccade.errors import StartupError
from saccade.transport.access import Access
from saccade.transport.credentials import NO_CREDENTIALS, Identity, WorkerCredentials
from saccade.transport.proto.worker_pb2 import DescribeRequest, KvEventsRequest
from saccade.transport.server import WorkerServer

__all__ = ["files"]

TOKEN = "0123456789abcdef"
OTHER = "0123456789abcdeg"
HERE = "127.0.0.1:0"
TLS = Identity(b"certificate", b"key")


@asynccontextmanager
async def listening(access: Access, bind: str = HERE) -> AsyncIterator[tuple[Front, WorkerServer]]:
    front = Front()
    server = WorkerServer(front, bind, access)
    await server.start()
    try:
        yield front, server
    finally:
        await server.stop()


@asynccontextmanager
async def calling(server: WorkerServer, credentials: WorkerCredentials) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(server.address, ClientContext(credentials=credentials))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"token": True}, {"token": True}),
        ({"token": True, "tls": True}, {"token": True, "tls": True}),
        ({"mutual": True}, {"mutual": True}),
        ({"token": True, "mutual": True}, {"token": True, "mutual": True}),
        ({}, {"token": True}),
    ],
)
async def test_gateway_with_required_credentials_connects(
    files: Files, asked: dict[str, bool], shown: dict[str, bool]
) -> None:
    async with (
        listening(files.access(**asked)) as (front, server),
        calling(server, files.credentials(**shown)) as client,
    ):
        await until(lambda: client.ready)  # Describe and Stream
        feed = asyncio.ensure_future(anext(client.kv_events(blocks=False)))
        await until(lambda: front.watchers)
        feed.cancel()
        assert server.address.startswith("grpcs://" if "tls" in asked or "mutual" in asked else "grpc://")


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"token": True}, {}),
        ({"token": True, "tls": True}, {"tls": True}),
        ({"mutual": True}, {"tls": True}),
        ({"mutual": True}, {"token": True, "tls": True}),
        ({"token": True, "mutual": True}, {"mutual": True}),
        ({"tls": True}, {}),
    ],
)
async def test_gateway_without_required_credentials_is_refused(
    files: Files, asked: dict[str, bool], shown: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        listening(files.access(**asked)) as (front, server),
        calling(server, files.credentials(**shown)) as client,
    ):
        await until(lambda: "cannot be reached, and is tried again" in caplog.text)
        assert not client.ready
        assert (front.num_connections, front.watchers) == (0, [])


async def test_certificate_of_another_authority_is_not_trusted(
    files: Files, tmp_path_factory: pytest.TempPathFactory
) -> None:
    others = Files(tmp_path_factory.mktemp("others"))
    async with listening(files.access(mutual=True)) as (front, server):
        stranger = WorkerCredentials(authorities=files.authorities, identity=others.gateway)
        mistaken = WorkerCredentials(authorities=others.authorities, identity=files.gateway)
        for credentials in (stranger, mistaken):
            async with credentials.channel(server.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await credentials.calls(channel).Describe(DescribeRequest(), timeout=10)
        assert front.num_connections == 0


async def _no_messages() -> AsyncIterator[Any]:
    """Hold a call open without a message: a write that meets the refusal would hide its status in gRPC's client."""
    await asyncio.Event().wait()
    yield


@table("shown", [None, OTHER, TOKEN[:-1], TOKEN + "0", "", "Ünïcode"])
async def test_every_method_but_health_asks_for_the_token(shown: str | None) -> None:
    async with (
        listening(Access(token=TOKEN)) as (front, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        metadata = () if shown is None else (("authorization", f"Bearer {shown}".encode().decode("latin-1")),)
        if shown == "Ünïcode":
            metadata = (("authorization-bin", shown.encode()), ("authorization", "Basic " + TOKEN))
        worker = NO_CREDENTIALS.calls(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        unknown = channel.unary_unary("/saccade.worker.v1.Worker/Unknown")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: worker.Describe(DescribeRequest(), metadata=metadata),
            lambda: worker.KvEvents(KvEventsRequest(blocks=True, images=True), metadata=metadata).read(),
            lambda: worker.Stream(_no_messages(), metadata=metadata).read(),
            lambda: reflection.ServerReflectionInfo(_no_messages(), metadata=metadata).read(),
            lambda: health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), metadata=metadata),
            lambda: unknown(b"", metadata=metadata),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call()
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "--worker-token-file" in str(refusal.value.details())
        assert (front.num_connections, front.watchers, front.commands) == (0, [], [])
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_reflection_answers_with_the_token() -> None:
    async with (
        listening(Access(token=TOKEN)) as (_, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([listing]), metadata=(("authorization", f"Bearer {TOKEN}"),))
        assert (await call.read()).list_services_response.service


async def test_wrong_token_is_logged_once_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    refusals = 0

    class Counting(Access):
        def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
            guard = super().interceptors()[0]
            ask = guard.intercept_service

            async def count(*arguments: object) -> object:
                nonlocal refusals
                refusals += 1
                return await ask(*arguments)

            guard.intercept_service = count
            return [guard]

    async with (
        listening(Counting(token=TOKEN)) as (_, server),
        calling(server, WorkerCredentials(token=OTHER)) as client,
    ):
        await until(lambda: refusals > 3)
        lines = [record.getMessage() for record in caplog.records if "cannot be reached" in record.getMessage()]
        assert len(lines) == 1
        assert OTHER not in caplog.text
        assert "--worker-token-file" in lines[0]
        assert "--worker-token-file" in client.loss
        port = server.port
        await server.stop()
        async with listening(Access(token=OTHER), f"127.0.0.1:{port}"):
            await until(lambda: client.ready)
            assert client.loss == ""


@table("bind", ["0.0.0.0:0", "[::]:0", ":0", "192.0.2.1:0", "worker.internal:0", "127.0.0.1.internal:0"])
@table("access", [Access(), Access(identity=TLS)], ids=["nothing", "TLS alone"])
async def test_address_that_others_reach_needs_a_token_or_certificates(bind: str, access: Access) -> None:
    with pytest.raises(StartupError, match=r"--worker-token-file.*--tls-client-ca"):
        await WorkerServer(Front(), bind, Access()).start()
    with pytest.raises(StartupError):
        access.check(bind)
    Access(token=TOKEN).check(bind)
    Access(identity=TLS, client_authorities=b"ca").check(bind)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "127.0.0.2:0", "[::1]:0", "localhost:0", "unix:/w.sock"])
def test_address_of_this_machine_needs_none(bind: str) -> None:
    Access().check(bind)


@pytest.mark.parametrize(
    ("access", "bind", "flag"),
    [
        (Access(token=TOKEN), "unix:/w.sock", "--worker-token-file"),
        (Access(identity=TLS), "unix:/w.sock", "--tls-cert"),
        (Access(allowed_uids=(1,)), HERE, "--allowed-uids"),
        (Access(client_authorities=b"ca"), HERE, "--tls-cert"),
    ],
)
def test_setting_that_would_do_nothing_is_refused(access: Access, bind: str, flag: str) -> None:
    with pytest.raises(StartupError, match=flag):
        access.check(bind)


@pytest.mark.parametrize(
    ("access", "bind", "words"),
    [
        (Access(), HERE, ["every user of this machine"]),
        (Access(token=TOKEN), HERE, []),
        (Access(token=TOKEN), "0.0.0.0:0", ["unencrypted"]),
        (Access(token=TOKEN, identity=TLS), "0.0.0.0:0", []),
        (Access(), "unix:/w.sock", []),
    ],
)
def test_meaning_of_an_address_is_logged(access: Access, bind: str, words: list[str]) -> None:
    remarks = list(access.remarks(bind))
    assert len(remarks) == len(words)
    assert all(word in remark for word, remark in zip(words, remarks, strict=True))


async def test_start_on_loopback_says_who_may_call(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(Access()):
        assert "every user of this machine may call the worker" in caplog.text


def test_secrets_are_not_shown() -> None:
    shown = f"{Access(token=TOKEN, identity=TLS)} {WorkerCredentials(token=TOKEN, identity=Identity(b'c', b'secret'))}"
    assert TOKEN not in shown
    assert "secret" not in shown
    assert "b'key'" not in shown


async def test_health_is_bounded_and_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.server.MAX_HEALTH_WATCHERS", 2)
    states = health_pb2.HealthCheckResponse
    async with (
        listening(Access(token=TOKEN)) as (_, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [states.NOT_SERVING, states.NOT_SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        server.set_ready(True)
        assert (await watches[0].read()).status == states.SERVING
        for watch in watches:
            watch.cancel()
        async with asyncio.timeout(10):
            await server.stop()


async def test_requests_of_strangers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is read would be refused here, as over the largest."""
    monkeypatch.setattr("saccade.transport.server.SERVER_OPTIONS", [("grpc.max_receive_message_length", 1 << 20)])
    async with (
        listening(Access(token=TOKEN)) as (_, server),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        request = health_pb2.HealthCheckRequest(service="x" * (4 << 20))
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(request, timeout=60)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        describe = channel.unary_unary("/saccade.worker.v1.Worker/Describe")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await describe(bytes(4 << 20), timeout=60)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_no_credentials_show_nothing() -> None:
    assert WorkerCredentials(None, None, None) == NO_CREDENTIALS
