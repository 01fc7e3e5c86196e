"""The client of vLLM's HTTP against a server that says whatever a test wants: discovery, and prompts as token ids."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pybase64
import pytest
from certificates import Files
from streams import QueueSink, generate, no_pixels
from tables import table
from vllm_publisher import publisher
from vllm_worker import (
    FILES,
    PIXELS,
    SOURCE,
    TWO_TOKENS,
    VllmServer,
    ask,
    connecting,
    event,
    image,
    kwargs_data,
    listening,
    registered,
    rendered,
    usage,
)
from waiting import until

from saccade.connectors.events.named_images import media_identifier
from saccade.connectors.vllm import client as vllm
from saccade.connectors.vllm import http as vllm_http
from saccade.connectors.vllm.client import VllmClient
from saccade.errors import (
    DeadlineExceeded,
    ImageTooLarge,
    InternalError,
    QueueFull,
    RequestError,
    SaccadeError,
    StartupError,
    UnsupportedParameter,
    WorkerFailed,
    WorkerUnavailable,
)
from saccade.identity.content import files_digest
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles
from saccade.protocol.exactness import EXACT
from saccade.protocol.media import SlotRef, Span
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest, Grammar, MediaPixels
from saccade.transport import wire

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
GENERATE = "/inference/v1/generate"


async def answer(client: VllmClient, request: EngineRequest) -> list[tuple[list[int], FinishReason | None, int]]:
    deltas = [delta async for delta in generate(client, request)]
    return [(delta.token_ids, delta.finish_reason, delta.num_cached_tokens) for delta in deltas]


async def outcome(server: VllmServer, request: EngineRequest) -> Any:
    """The answer to *request*, or the kind of error that it ends with."""
    async with listening(server) as url, registered(url) as client:
        try:
            return await answer(client, request)
        except SaccadeError as error:
            return "shown" if "words of the engine's" in error.message else type(error)


def asked(server: VllmServer) -> list[Any]:
    """The bodies of the requests for answers."""
    return [body for path, body in zip(server.paths, server.requests, strict=True) if not path.endswith("/render")]


async def test_description() -> None:  # A5 E8
    server = VllmServer()
    server.names = ["m", "other-name"]
    async with listening(server) as url, registered(url) as client:
        said = client.description
        await until(lambda: client.load)
        load = client.load
        asked_at, answered_at = client.load_times
        assert asked_at < answered_at <= time.monotonic()
        assert client.exactness == EXACT
    assert said is not None
    assert load is not None
    assert (said.model, said.aliases, said.max_model_len) == ("m", ("other-name",), 4096)
    assert (said.block_size, said.num_blocks, said.enable_prefix_caching) == (32, 64, True)
    assert (said.pixel_dtype, said.version, said.shm_namespace) == ("uint8", "vllm 0.32.0", "")
    assert (said.files, said.fingerprint) == (FILES, files_digest(FILES.files))
    assert (load.num_running, load.num_waiting, load.num_blocks, load.num_free_blocks) == (32, 1, 64, 48)
    assert (load.prompt_tokens_total, load.cached_tokens_total) == (3800, 1152)
    assert (load.generated_tokens_total, load.preemptions_total) == (96, 4)
    assert not client.ready


async def test_files_of_a_folder_that_the_gateway_can_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"[]")
    server = VllmServer()
    server.root = str(tmp_path)
    async with listening(server) as url, registered(url, model_files={}, read_files=read_model_files) as client:
        assert client.description is not None
        assert client.description.files == ModelFiles(files={"config.json": b"[]"})


async def test_without_files_the_log_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(VllmServer()) as url, connecting(url, model_files={}) as client:
        await until(lambda: "give --model m=MODEL" in caplog.text)
        assert client.description is None


@table(
    ("change", "level", "reason"),
    [
        ({}, "EXACT", ""),
        ({"sources": {}}, "NONE", "--kv-events-config"),
        ({"sources": {"0": SOURCE, "1": SOURCE}}, "NONE", "?ranks=2"),
        ({"render": 403}, "TEXT_PREFIX", "--enable-scale-out"),
        ({"render": 500}, "TEXT_PREFIX", "was 500"),
        ({"render": rendered("AAAA")}, "TEXT_PREFIX", "patches and grid"),
        ({"render": rendered(kwargs_data(bytes(96), (4, 24), (1, 2, 3)))}, "TEXT_PREFIX", "patches of uint8"),
        ({"render": rendered(kwargs_data(bytes(96), (4, 3), (1, 2, 2), "int16"))}, "TEXT_PREFIX", "patches of int16"),
    ],
)
async def test_exactness(change: dict[str, Any], level: str, reason: str) -> None:  # E5
    server = VllmServer()
    vars(server).update(change)
    async with listening(server) as url, registered(url) as client:
        assert client.exactness.level == level
        assert reason in client.exactness.reason
        assert client.state.takes_chats == (level == "TEXT_PREFIX")
    assert client.exactness.level == "NONE"


async def test_a_worker_without_a_prefix_cache_is_not_known() -> None:
    server = VllmServer()
    server.metrics = server.metrics.replace('caching="True"', 'caching="False"')
    async with listening(server) as url, registered(url) as client:
        assert client.exactness.level == "NONE"


async def test_prompt_as_token_ids() -> None:  # E8 F4
    server = VllmServer()
    request = ask(image(), temperature=0.5, top_k=3, seed=-1)
    async with listening(server) as url, registered(url) as client:
        assert await answer(client, request) == [([1], None, 0), ([2], LENGTH, 3)]
    assert server.paths == ["/v1/chat/completions/render", GENERATE]
    (body,) = asked(server)
    assert body["token_ids"] == request.token_ids
    assert (body["model"], body["request_id"], body["stream"]) == ("m", "r1", True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["cache_salt"] is None
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["seed"]) == (0.5, 3, (1 << 63) - 1)
    assert (sampling["stop_token_ids"], sampling["ignore_eos"], sampling["max_tokens"]) == ([7], True, 10)
    assert (sampling["n"], sampling["logprobs"], sampling["detokenize"]) == (1, None, False)
    features = body["features"]
    assert features["mm_hashes"] == {"image": [media_identifier(b"", bytes(32))]}
    assert features["mm_placeholders"] == {"image": [{"offset": 1, "length": 2}]}
    (data,) = features["kwargs_data"]["image"]
    item = msgspec.msgpack.decode(pybase64.b64decode(data))
    dtype, shape, raw = item["pixel_values"]["data"]
    assert (dtype, shape, raw.code) == ("uint8", [8, 24], 3)
    # A patch is [channel][frame][pixel]; both frames are the one that travels on our own wire.
    frames = np.frombuffer(raw.data, np.uint8).reshape(8, 3, 2, 4)
    own = np.frombuffer(PIXELS, np.uint8).reshape(8, 3, 4)
    assert np.array_equal(frames[:, :, 0], own)
    assert np.array_equal(frames[:, :, 1], own)
    assert item["pixel_values"]["field"] == ["flat", {"keep_on_cpu": False, "slices": [[[0, 8, None]]], "dim": 0}]
    dtype, shape, raw = item["image_grid_thw"]["data"]
    assert (dtype, shape, raw.data) == ("int64", [3], b"".join(n.to_bytes(8, "little") for n in (1, 2, 4)))
    assert item["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


async def test_a_large_body_is_sent_in_pieces() -> None:
    # aiohttp warns of a body of more than 1 MiB that is written at once, and warnings are errors here.
    server = VllmServer()
    large = image(pixel_shape=(100_000, 12), inline=bytes(1_200_000))
    async with listening(server) as url, registered(url) as client:
        assert len(await answer(client, ask(large))) == 2
    (data,) = asked(server)[0]["features"]["kwargs_data"]["image"]
    assert len(data) > 3_200_000


async def test_normalised_patches_are_sent_unchanged() -> None:
    server = VllmServer()
    server.render = rendered(kwargs_data(bytes(4 * 24 * 4), (4, 24), (1, 2, 2), "float32"))
    pixels = np.arange(8 * 24, dtype="<f4").tobytes()
    async with listening(server) as url, registered(url) as client:
        assert client.description is not None
        assert client.description.pixel_dtype == "float32"
        await answer(client, ask(image(inline=pixels, pixel_shape=(8, 24), pixel_dtype="float32")))
    item = msgspec.msgpack.decode(pybase64.b64decode(asked(server)[0]["features"]["kwargs_data"]["image"][0]))
    assert item["pixel_values"]["data"][0] == "float32"
    assert item["pixel_values"]["data"][2].data == pixels


async def test_tenants_share_neither_blocks_nor_images() -> None:  # contract 1
    server = VllmServer()
    async with listening(server) as url, registered(url) as client:
        for salt in (b"", b"one", b"other"):
            await answer(client, ask(image(), salt=salt))
    assert [body["cache_salt"] for body in asked(server)] == [None, b"one".hex(), b"other".hex()]
    assert len({body["features"]["mm_hashes"]["image"][0] for body in asked(server)}) == 3
    assert all(body["features"]["kwargs_data"]["image"][0] for body in asked(server))


async def test_parameters_that_the_wire_has() -> None:
    server = VllmServer()
    given: dict[str, Any] = {"min_p": 0.25, "presence_penalty": 1.0, "frequency_penalty": -1.0, "top_p": 0.5}
    given |= {"repetition_penalty": 1.5, "min_tokens": 3}
    async with listening(server) as url, registered(url) as client:
        await answer(client, ask(**given, logit_bias={5: -2.5}, allowed_token_ids=(4, 5)))
        await answer(client, ask(name="r2"))
    said, unsaid = (body["sampling_params"] for body in asked(server))
    assert {name: said[name] for name in given} == given
    assert (said["logit_bias"], said["allowed_token_ids"]) == ({"5": -2.5}, [4, 5])
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: unsaid[name] for name in neutral} == neutral
    assert (unsaid["logit_bias"], unsaid["allowed_token_ids"], unsaid["seed"]) == (None, None, None)


async def test_priority_goes_on_unless_it_is_zero() -> None:
    server = VllmServer()
    async with listening(server) as url, registered(url) as client:
        for priority in (-7, 0, msgspec.UNSET):
            await answer(client, msgspec.structs.replace(ask(), priority=priority))
    assert [body.get("priority") for body in asked(server)] == [-7, None, None]


async def test_a_structural_tag_holds_from_the_first_token() -> None:  # F13
    server = VllmServer()
    async with listening(server) as url, registered(url) as client:
        await answer(client, ask(grammar=Grammar("structural_tag", "{}")))
        await answer(client, ask(name="r2"))
    tagged, free = asked(server)
    assert tagged["sampling_params"]["structured_outputs"] == {"structural_tag": "{}"}
    assert tagged["reasoning_ended"] is True
    assert "structured_outputs" not in free["sampling_params"]


async def test_prompt_logprobs_are_refused_by_name() -> None:
    async with listening(VllmServer()) as url, registered(url) as client:
        with pytest.raises(UnsupportedParameter, match="prompt_logprobs") as failure:
            await answer(client, ask(num_prompt_logprobs=0))
    assert failure.value.param == "prompt_logprobs"


@pytest.mark.parametrize(("wanted", "sent"), [(0, 0), (2, 3), (20, 20)])
async def test_log_probabilities(wanted: int, sent: int) -> None:
    """vLLM puts the drawn token first and counts it, likely or not."""
    top = [{"token_id": 9, "logprob": -3.0, "rank": 5}] + [
        {"token_id": 20 + rank, "logprob": -0.1 * rank, "rank": rank} for rank in range(1, sent)
    ]
    content = [{"token_id": 9, "logprob": -3.0, "rank": 5, "top_logprobs": top[: max(sent, 1)]}]
    server = VllmServer()
    server.script = [event(9, reason="stop", logprobs={"content": content}), usage()]
    async with listening(server) as url, registered(url) as client:
        (delta,) = [delta async for delta in generate(client, ask(num_logprobs=wanted))]
    assert asked(server)[0]["sampling_params"]["logprobs"] == sent
    (told,) = delta.logprobs
    assert (told.logprob, told.rank) == (-3.0, 5)
    assert told.top_ids[:2] == ([21, 22] if wanted else [])
    assert len(told.top_ids) == wanted
    assert told.top_logprobs == sorted(told.top_logprobs, reverse=True)


async def test_several_samples() -> None:  # B9
    server = VllmServer()
    server.script = [event(1), event(5, index=1), event(2, reason="stop"), event(6, index=1, reason="length"), usage(4)]
    async with listening(server) as url, registered(url) as client:
        deltas = [delta async for delta in generate(client, ask(num_samples=2))]
    assert asked(server)[0]["sampling_params"]["n"] == 2
    assert [(delta.index, delta.token_ids, delta.finish_reason) for delta in deltas] == [
        (0, [1], None),
        (1, [5], None),
        (1, [6], LENGTH),
        (0, [2], STOP),
    ]
    assert [delta.num_cached_tokens for delta in deltas] == [0, 0, 0, 4]


@table(
    ("script", "expected"),
    [
        ([event(1, 2, reason="stop"), usage(None)], [([1, 2], STOP, 0)]),
        ([event(1), event(reason="length"), usage(2)], [([1], None, 0), ([], LENGTH, 2)]),
        ([event(1, reason="tool_calls")], [([1], STOP, 0)]),
        ([event(1), event(2)], WorkerFailed),
        ([event(1, reason="abort"), usage()], WorkerFailed),
        ([event(1, reason="a new one"), usage()], WorkerFailed),
        ([event(1, index=1), usage()], WorkerFailed),
        (["no JSON", usage()], WorkerFailed),
        ([{"choices": 3}], WorkerFailed),
        ([event(1), "break"], WorkerFailed),
        ([event(1), {"error": {"message": "words of the engine's", "code": 500}}], WorkerFailed),
        ([{"error": {"message": "words of the engine's", "code": 400}}], RequestError),
        ([400], RequestError),
        ([422], RequestError),
        ([429], QueueFull),
        ([401], WorkerUnavailable),
        ([404], WorkerUnavailable),
        ([503], WorkerUnavailable),
        ([504], DeadlineExceeded),
        ([500], WorkerFailed),
        ([302], WorkerFailed),
    ],
)
async def test_answers_and_refusals(script: list[Any], expected: Any) -> None:  # contract 7
    server = VllmServer()
    server.script = script
    assert await outcome(server, ask()) == expected


async def test_closing_the_iterator_aborts_the_request() -> None:
    server = VllmServer()
    server.script = [event(1), 60.0]
    async with listening(server) as url, registered(url) as client:
        deltas = generate(client, ask())
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: server.num_aborted)
    assert server.num_finished == 0


async def test_an_error_of_the_reader_is_not_the_workers() -> None:
    class Broken(QueueSink):
        """Fails at the first delta, for a reason of its own."""

        def __init__(self) -> None:
            super().__init__(no_pixels)
            self.delta = self._refuse

        def _refuse(self, _: object) -> None:
            raise OSError("the client's connection broke")

    sink = Broken()
    async with listening(VllmServer()) as url, registered(url) as client:
        stream = client.generate(ask(), sink)
        error = await sink.arrived.get()
        await stream.close()
    assert type(error) is OSError


async def test_a_request_that_waits_for_its_first_token_is_aborted() -> None:
    server = VllmServer()
    server.script = [60.0]
    async with listening(server) as url, registered(url) as client:
        task = asyncio.create_task(answer(client, ask()))
        await until(lambda: asked(server))
        task.cancel()
        await until(lambda: server.num_aborted)


async def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "IDLE_SECONDS", 60.0)
    server = VllmServer()
    async with listening(server) as url, registered(url) as client:
        for _ in range(6):
            await answer(client, ask())
    assert server.num_finished == 6
    # The client asks for load and health at the same time, over a connection of its own.
    assert len(server.peers) <= 2


async def test_evicted_image_is_sent_again() -> None:  # F5
    server = VllmServer()
    server.held = set()
    wanted: list[list[int]] = []

    async def supply(media: Any) -> tuple[MediaPixels, ...]:
        wanted.append(list(media))
        return tuple(MediaPixels(index, inline=PIXELS) for index in media)

    request = ask(image(1), image(2, start=3, inline=None))
    async with listening(server) as url, registered(url) as client:
        deltas = [delta async for delta in generate(client, request, supply)]
        assert [delta.token_ids for delta in deltas] == [[1], [2]]
    assert wanted == [[1]]
    first, again = asked(server)
    assert first["request_id"] != again["request_id"]
    assert all(again["features"]["kwargs_data"]["image"])
    assert {delta.request_id for delta in deltas} == {"r1"}


@pytest.mark.parametrize("script", [[400], [429], [503], [event(1), {"error": {"code": 500}}]])
async def test_other_failures_are_not_tried_again(script: list[Any]) -> None:
    server = VllmServer()
    server.script = script

    async def supply(_: Any) -> tuple[MediaPixels, ...]:
        raise AssertionError("asked for pixels")

    async with listening(server) as url, registered(url) as client:
        with pytest.raises(SaccadeError):
            async for _ in generate(client, ask(image(inline=None)), supply):
                pass
    assert len(asked(server)) == 1


async def test_images_that_the_form_does_not_fit() -> None:
    other = image(pixel_shape=(8, 7), inline=bytes(56))
    two_spans = image(spans=(Span(1, 1), Span(2, 1)))
    for item in (other, two_spans, image(pixel_dtype="float32")):
        assert await outcome(VllmServer(), ask(item)) is UnsupportedParameter


async def test_slots_come_back_and_are_refused() -> None:
    released: list[str] = []
    slot = SlotRef(name="s", generation=1, nbytes=96)
    async with listening(VllmServer()) as url, registered(url, on_released=released.extend) as client:
        with pytest.raises(InternalError):
            await answer(client, ask(image(inline=None, slot=slot)))
    assert released == ["s"]


async def test_too_many_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 191)
    assert await outcome(VllmServer(), ask(image(1), image(2, start=3))) is ImageTooLarge
    assert await outcome(VllmServer(), ask(image(1))) == [([1], None, 0), ([2], LENGTH, 3)]


async def test_a_worker_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "WATCH_EVERY_SECONDS", 0.01)
    server = VllmServer()
    changes: list[bool] = []

    def note(client: VllmClient) -> None:
        changes.append(client.ready)

    async with listening(server) as url, registered(url, on_change=note) as client:
        server.healthy = False
        await until(lambda: not client.ready)
        with pytest.raises(WorkerUnavailable):
            await answer(client, ask())
        assert client.load is None
        server.healthy = True
        await until(lambda: client.ready)
        assert await answer(client, ask())
    assert changes[:3] == [True, False, True]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "x"])
async def test_gauges_without_a_reading_are_zero(value: str) -> None:
    server = VllmServer()
    server.metrics = server.metrics.replace("} 0.25", f"}} {value}").replace("} 2.0", f"}} {value}")
    async with listening(server) as url, registered(url) as client:
        await until(lambda: client.load is not None)
        assert client.load is not None
        assert (client.load.num_running, client.load.num_free_blocks) == (30, 64)


async def test_nested_answers_are_refused() -> None:  # contract 7
    server = VllmServer()
    server.script = ['{"x":' + "[" * 100_000]
    assert await outcome(server, ask()) is WorkerFailed
    with pytest.raises(WorkerUnavailable):
        vllm_http.parsed(b"[" * 100_000)


@table(
    "sent",
    [
        ['{"choices":[' + "{}," * 70_000 + "{}]}"],
        ['{"choices":[{"index":0,"token_ids":[' + "1," * (1 << 21) + "1]}]}"],
        ["{}"] * 1200,
        ['{"prompt_token_ids":[]}'] * 1200,
    ],
    ids=["choices", "ids", "empty events", "events without tokens"],
)
async def test_events_of_more_values_than_an_answer_has_fail_their_request(sent: list[str]) -> None:
    server = VllmServer()
    server.scripts = [sent, list(TWO_TOKENS)]
    async with listening(server) as url, registered(url) as client:
        with pytest.raises(WorkerFailed, match="more than was asked for"):
            await answer(client, ask(max_tokens=11))
        assert await answer(client, ask())


@table("body", [b"[" + b"[]," * 70_000 + b"[]]", b"[" + b"1," * (1 << 21) + b"1]", b"{" * 70_000])
def test_replies_of_too_many_values_are_not_decoded(body: bytes) -> None:
    with pytest.raises(WorkerUnavailable, match="more values"):
        vllm_http.parsed(body)


def test_a_reply_with_brackets_in_its_texts_is_read() -> None:
    text = "[{," * 70_000
    assert vllm_http.parsed(msgspec.json.encode({"template": text})) == {"template": text}


async def test_a_request_that_is_made_while_its_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "THREAD_FROM_TOKENS", 0)
    async with listening(VllmServer()) as url, registered(url) as client:
        deltas = generate(client, ask())
        first = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)  # the body is being made in a thread
        await client.close()
        with pytest.raises((WorkerUnavailable, WorkerFailed)):
            await first


async def test_a_server_that_was_slow_is_still_known_by_its_feed(monkeypatch: pytest.MonkeyPatch) -> None:  # E5
    monkeypatch.setattr(vllm, "WATCH_EVERY_SECONDS", 0.01)
    server = VllmServer()
    async with publisher() as events:
        server.sources = {"0": {"endpoint": events.source.endpoint}}
        async with listening(server) as url, registered(url) as client:
            feed = client.kv_events(blocks=True)
            assert (await anext(feed)).last
            assert client.exactness.level == "DEGRADED"
            server.healthy = False
            await until(lambda: not client.ready)
            server.healthy = True
            await until(lambda: client.ready)
            assert client.exactness.level == "DEGRADED"
            await feed.aclose()


async def test_a_worker_that_starts_late() -> None:
    async with listening(VllmServer()) as url:
        port = int(url.rpartition(":")[2])
    async with connecting(url) as client:
        await asyncio.sleep(0)
        assert not client.ready
        async with listening(VllmServer(), port=port):
            await until(lambda: client.ready)
        with pytest.raises(WorkerUnavailable):
            async for _ in generate(client, ask()):
                pass


async def test_closing_fails_open_requests() -> None:
    server = VllmServer()
    server.script = [event(1), 60.0]
    async with listening(server) as url, registered(url) as client:
        deltas = generate(client, ask())
        assert isinstance(await anext(deltas), TokenDelta)
        await client.close()
        with pytest.raises(WorkerFailed):
            await anext(deltas)
        await until(lambda: server.num_aborted)


async def test_the_workers_key(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    files = Files(tmp_path)
    server = VllmServer()
    server.key = files.token
    async with listening(server) as url:
        async with connecting(url) as client:
            await until(lambda: "--worker-token-file" in caplog.text)
            assert not client.ready
        async with registered(url, credentials=files.credentials(token=True)) as client:
            await answer(client, ask())
    assert server.headers[0]["Authorization"] == f"Bearer {files.token}"


async def test_a_trace_goes_on_in_a_header() -> None:
    server = VllmServer()
    async with listening(server) as url, registered(url) as client:
        await answer(client, msgspec.structs.replace(ask(), traceparent="00-1-2-01"))
    assert server.headers[-1]["traceparent"] == "00-1-2-01"


async def test_tls_in_both_directions(tmp_path: Path) -> None:
    files = Files(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "worker.pem", tmp_path / "worker.key")
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    server = VllmServer()
    async with listening(server, context) as url:
        assert url.startswith("vllms://")
        async with registered(url, credentials=files.credentials(mutual=True)) as client:
            assert await answer(client, ask())
        async with connecting(url) as stranger:
            await until(lambda: "no secure connection" in stranger.loss)
            assert not stranger.ready


async def test_a_server_that_is_not_there_is_called_so() -> None:
    async with connecting("vllm://127.0.0.1:1") as client:
        await until(lambda: client.loss == "/health was not answered: no server listens at this address.")


async def test_ranks_are_targets_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    server = VllmServer()
    server.sources = {"0": SOURCE, "1": SOURCE}
    async with listening(server) as url:
        first, second = vllm_http.ADDRESSES.worker_urls(f"{url}?ranks=2")
        async with registered(first) as one, registered(second) as other:
            await answer(other, ask())
            await until(lambda: one.load and other.load)
            assert one.url != other.url
            assert one.load is not None
            assert other.load is not None
            assert other.description is not None
            assert (one.exactness, other.exactness) == (EXACT, EXACT)
            assert (one.load.num_running, other.load.num_running) == (2, 30)
            assert other.description.num_blocks == 48
        del server.sources["1"]
        async with registered(second) as silent:
            assert silent.exactness.level == "NONE"
        async with connecting(f"{url}?rank=2"):
            await until(lambda: "no data-parallel rank 2" in caplog.text)
    assert server.headers[0]["X-data-parallel-rank"] == "1"


@table(
    "url",
    [
        "vllm://h",
        "vllm://:1",
        "vllm://h:1/path",
        "vllm://h:1?ranks=0",
        "vllm://h:1?ranks=x",
        "vllm://h:1?ranks=9999",
        "vllm://h:1?other=1",
        "vllm://h:1?ranks=2&rank=1",
        "vllm://user@h:1",
        "vllm://h:99999999",
        "http://h:1",
    ],
)
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(StartupError, match="vllm://host:port"):
        vllm_http.ADDRESSES.worker_urls(url)


def test_addresses() -> None:
    assert vllm_http.ADDRESSES.worker_urls("vllms://h:1") == ("vllms://h:1",)
    assert vllm_http.ADDRESSES.worker_urls("vllm://[::1]:8?ranks=2") == (
        "vllm://[::1]:8?rank=0",
        "vllm://[::1]:8?rank=1",
    )
    assert vllm_http.address("vllms://h:1?rank=3") == vllm_http.VllmAddress("https://h:1", "h", 3)
    assert vllm_http.address("vllm://[::1]:8").origin == "http://[::1]:8"


class Arriving:
    """A response whose bytes arrive in *pieces*."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.content = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


async def test_an_event_may_come_in_pieces() -> None:
    pieces = [b"da", b'ta: {"a"', b": 1}\n", b"\ndata: 2\r\n\r\n: ping\n\ndata: 3", b"\n\ndata: [DO", b"NE]\n\n"]
    found = [data async for data in vllm_http.events(Arriving(*pieces))]  # type: ignore[arg-type]
    assert found == [b'{"a": 1}', b"2", b"3"]


async def test_an_endless_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "MAX_EVENT_BYTES", 100)
    with pytest.raises(WorkerFailed):
        async for _ in vllm_http.events(Arriving(b"data: ", *[b"1" * 50] * 3)):  # type: ignore[arg-type]
            pass


async def test_a_worker_that_does_not_stop_is_aborted() -> None:
    server = VllmServer()
    server.script = [event(*range(20, 26)), event(*range(26, 32)), 60.0]
    async with listening(server) as url, registered(url) as client:
        with pytest.raises(WorkerFailed, match="more than was asked for"):
            await answer(client, ask(max_tokens=11))
        await until(lambda: server.num_aborted == 1)
