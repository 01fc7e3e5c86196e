"""The attacks of a siege: what each sends, its control, and the budgets that it may fill.

A control is an honest load of the same size: the same connections, pauses and, where it matters, bytes. Each attack has
a fixed number of workers and a least time between two starts of a worker, so that none depends on bandwidth or cores.
"""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from benchmarks.reliability import siege_payloads as payloads
from benchmarks.reliability import siege_worker_attacks as by_worker
from benchmarks.reliability.siege_client import Messages, Target, connected
from benchmarks.reliability.siege_payloads import MOST_SAMPLES, STOPS

REQUESTS, PIXELS, FILES, RESPONSES = "requests", "pixels", "files", "responses"
"""Parts of the gateway's memory that have a budget."""

Attempt = Callable[[Target, str, int], Awaitable[str]]
"""One try of a worker, from its address and with its number. Returns in words how it ended."""

ID = re.compile(rb'"id":\s*"([^"]+)"')


@dataclass(frozen=True)
class Attack:
    """*workers* repeat *attempt*, or *control*; each begins at most once in *pause_seconds*.

    If *holds*, its requests end when the attackers let go, or later by a deadline of the server. If *is_by_worker*, a
    hostile worker attacks its gateway.
    """

    workers: int
    pause_seconds: float
    attempt: Attempt
    control: Attempt
    fills: tuple[str, ...] = (REQUESTS,)
    holds: bool = False
    is_by_worker: bool = False


def _sent(make: Messages) -> Attempt:
    """Return the attempt that sends the next of the messages that *make* returns."""

    async def send(target: Target, address: str, number: int) -> str:
        return await target.ask(address, target.next_message(make))

    return send


def _chat(target: Target, content: object, **fields: object) -> bytes:
    return target.message(payloads.chat(target.model, content, **fields))


async def text(target: Target, address: str, number: int) -> str:
    """Send a short chat: the control of attacks whose messages are small."""
    return await target.ask(address, _chat(target, f"Number {next(target.serial)}. Hello!", max_tokens=4))


def upload_of(nbytes: int) -> Attempt:
    """Return the control of large bodies: a chat with an image in *nbytes* of data: URL."""

    def make(target: Target) -> Iterator[bytes]:
        url = payloads.data_url(payloads.padded_jpeg((nbytes - 1024) // 4 * 3), "jpeg")
        return itertools.repeat(_chat(target, payloads.image_parts(url), max_tokens=1))

    return _sent(make)


async def quick_host(target: Target, address: str, number: int) -> str:
    """Name an image that its host does not have: the control of slow hosts."""
    return await target.ask_for(address, "missing")


async def tarpit(target: Target, address: str, number: int) -> str:
    """Name a host that accepts and never answers."""
    return await target.ask_for(address, "tarpit")


async def dripping_host(target: Target, address: str, number: int) -> str:
    """Name a host that sends one byte a second."""
    return await target.ask_for(address, "drip")


async def stalling_host(target: Target, address: str, number: int) -> str:
    """Name a host that stalls behind its headers."""
    return await target.ask_for(address, "stall")


async def siblings(target: Target, address: str, number: int) -> str:
    """Name one image that is missing among slow ones."""
    return await target.ask_for(address, "missing", *["tarpit"] * payloads.NUM_SIBLINGS)


async def dripped_head(target: Target, address: str, number: int) -> str:
    """Send a head of one byte a second."""
    return await target.drip(address, b"", payloads.endless_head(), 1.0)


async def dripped_body(target: Target, address: str, number: int) -> str:
    """Announce a large body and send a byte of it every two seconds."""
    start = payloads.head(payloads.LARGE_BYTES, target.key, port=target.port) + b"{"
    return await target.drip(address, start, itertools.repeat(b" "), 2.0)


async def dripped_chunks(target: Target, address: str, number: int) -> str:
    """Send a chunked body of one byte every two seconds."""
    start = payloads.head(None, target.key, port=target.port) + b"1\r\n{\r\n"
    return await target.drip(address, start, itertools.repeat(b"1\r\n \r\n"), 2.0)


async def silence(target: Target, address: str, number: int) -> str:
    """Connect and say nothing."""
    return await target.drip(address, b"", itertools.repeat(b""), 1.0)


async def pipelined(target: Target, address: str, number: int) -> str:
    """Send two chats at once, and reset the connection."""
    body = payloads.chat(target.model, "Hello!", max_tokens=64, ignore_eos=True)
    async with connected(address, target.port) as (_, writer):
        writer.write(payloads.head(len(body), target.key, port=target.port, closes=False) + body)
        writer.write(target.message(body))
        await asyncio.sleep(0.05)
        writer.transport.abort()
    return "reset"


async def unread_stream(target: Target, address: str, number: int) -> str:
    """Ask for a long stream of many samples and read none of it."""
    return await target.leave_unread(address, _stream(target, payloads.READER_TOKENS, payloads.READER_SAMPLES))


async def unread_samples(target: Target, address: str, number: int) -> str:
    """As unread_stream(), of as many samples as there can be."""
    return await target.leave_unread(address, _stream(target, payloads.READER_TOKENS, MOST_SAMPLES))


async def read_stream(target: Target, address: str, number: int) -> str:
    """Read such a stream: the control of unread_stream()."""
    return await target.ask(address, _stream(target, payloads.READER_TOKENS, payloads.READER_SAMPLES))


async def read_samples(target: Target, address: str, number: int) -> str:
    """Read such a stream: the control of unread_samples()."""
    return await target.ask(address, _stream(target, payloads.READER_TOKENS, MOST_SAMPLES))


def _stream(target: Target, num_tokens: int, num_samples: int) -> bytes:
    return _chat(
        target,
        f"Tell story {next(target.serial)}.",
        max_tokens=num_tokens,
        n=num_samples,
        ignore_eos=True,
        stream=True,
        logprobs=True,
        top_logprobs=20,
    )


async def unread_download(target: Target, address: str, number: int) -> str:
    """Ask for an uploaded file and read none of it."""
    return await target.leave_unread(address, await _download(target, address))


async def download(target: Target, address: str, number: int) -> str:
    """Read the file: the control."""
    return await target.ask(address, await _download(target, address))


async def _download(target: Target, address: str) -> bytes:
    async def upload() -> str:
        form = payloads.form(payloads.random_png(payloads.FILE_BYTES))
        head = payloads.head(len(form), target.key, "/v1/files", payloads.FORM_TYPE, target.port)
        return _id_of(await target.read_answer(address, head + form))

    file_id = await target.prepare("file").get(upload)
    return target.message(b"", f"/v1/files/{file_id}/content", method="GET")


async def unread_detokenized(target: Target, address: str, number: int) -> str:
    """Ask for the text of many token ids and read none of it."""
    return await target.leave_unread(address, target.message(payloads.detokenize(target.model), "/detokenize"))


async def detokenized(target: Target, address: str, number: int) -> str:
    """Read the text: the control."""
    return await target.ask(address, target.message(payloads.detokenize(target.model), "/detokenize"))


async def stored_conversation(target: Target, address: str, number: int) -> str:
    """Continue a stored conversation that has a large image, with an image at a host that never answers."""
    return await _continued(target, address, "tarpit")


async def quick_conversation(target: Target, address: str, number: int) -> str:
    """The same with a host that answers: the control."""
    return await _continued(target, address, "missing")


async def _continued(target: Target, address: str, path: str) -> str:
    async def store() -> str:
        url = payloads.data_url(payloads.padded_jpeg(payloads.FILE_BYTES), "jpeg")
        body = payloads.response(target.model, url)
        return _id_of(await target.read_answer(address, target.message(body, "/v1/responses")))

    stored = await target.prepare("response").get(store)
    url = target.hosts.url(path, next(target.serial))
    body = payloads.response(target.model, url, previous_response_id=stored)
    return await target.ask(address, target.message(body, "/v1/responses"))


def _id_of(answer: bytes) -> str:
    found = ID.search(answer.partition(b"\r\n\r\n")[2])
    if found is None:
        raise ValueError(f"no id in {answer[:300]!r}")
    return found[1].decode()


async def many_samples(target: Target, address: str, number: int) -> str:
    """Ask for as many samples as there can be."""
    return await target.ask(address, _chat(target, "Hello!", n=MOST_SAMPLES, max_tokens=64, ignore_eos=True))


async def many_chats(target: Target, address: str, number: int) -> str:
    """Ask for eight answers in eight requests: the control."""
    body = _chat(target, "Hello!", max_tokens=64, ignore_eos=True)
    return (await asyncio.gather(*(target.ask(address, body) for _ in range(8))))[0]


async def stop_strings(target: Target, address: str, number: int) -> str:
    """Send long stop strings for many samples."""
    return await target.ask(address, _chat(target, "Hello!", n=MOST_SAMPLES, max_tokens=1, stop=STOPS))


async def many_short_samples(target: Target, address: str, number: int) -> str:
    """Ask for many samples without stop strings: the control."""
    return await target.ask(address, _chat(target, "Hello!", n=MOST_SAMPLES, max_tokens=1))


async def many_prompts(target: Target, address: str, number: int) -> str:
    """Send long stop strings for many prompts."""
    body = payloads.completion(target.model, ["Hello!"] * MOST_SAMPLES, max_tokens=1, stop=STOPS)
    return await target.ask(address, target.message(body, "/v1/completions"))


async def many_short_prompts(target: Target, address: str, number: int) -> str:
    """Send many prompts without stop strings: the control."""
    body = payloads.completion(target.model, ["Hello!"] * MOST_SAMPLES, max_tokens=1)
    return await target.ask(address, target.message(body, "/v1/completions"))


async def whole_logprobs(target: Target, address: str, number: int) -> str:
    """Ask for a whole answer with as many log probabilities as the engine computes in some seconds."""
    return await target.ask(address, _with_logprobs(target, stream=False))


async def streamed_logprobs(target: Target, address: str, number: int) -> str:
    """The same as a stream: the control."""
    return await target.ask(address, _with_logprobs(target, stream=True))


def _with_logprobs(target: Target, stream: bool) -> bytes:
    more = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "stream": stream}
    return _chat(target, f"Number {next(target.serial)}.", n=16, max_tokens=100, **more)


async def new_schema(target: Target, address: str, number: int) -> str:
    """Send a schema that no cache has."""
    return await target.ask(address, _chat(target, "Hello!", max_tokens=1, **payloads.schema(next(target.serial))))


async def known_schema(target: Target, address: str, number: int) -> str:
    """Send a schema that was sent before: the control."""
    return await target.ask(address, _chat(target, "Hello!", max_tokens=1, **payloads.schema(-1)))


def _refused(target: Target) -> Iterator[bytes]:
    return itertools.cycle([make(target.key, target.port) for make in payloads.refused(target.model).values()])


def _maximal(target: Target) -> Iterator[bytes]:
    return itertools.cycle([target.message(body) for body in payloads.maximal(target.model).values()])


def _objects(target: Target) -> Iterator[bytes]:
    made = payloads.without_strings(target.model, payloads.MAX_JSON_BYTES)
    return itertools.cycle([target.message(body, path) for path, body in made.values()])


def _bombs(target: Target) -> Iterator[bytes]:
    return itertools.cycle([target.message(body) for body in payloads.bombs(target.model).values()])


def _encoded_bombs(target: Target) -> Iterator[bytes]:
    made = payloads.encoded_bombs().values()
    return itertools.cycle([target.message(body, coding=coding) for coding, body in made])


def _images(target: Target) -> Iterator[bytes]:
    return itertools.repeat(_chat(target, payloads.image_parts(payloads.data_url(payloads.small_png())), max_tokens=1))


async def abandoned(target: Target, address: str, number: int) -> str:
    """Send one of the largest bodies whole, and leave."""
    await target.leave(address, target.next_message(_maximal))
    return "left"


async def slow_pdf(target: Target, address: str, number: int) -> str:
    """Send a short PDF whose page takes seconds to draw."""
    return await target.ask(address, _pdf(target, payloads.SLOW_FILLS + next(target.serial) % 7))


async def quick_pdf(target: Target, address: str, number: int) -> str:
    """Send the same PDF with little to draw: the control."""
    return await target.ask(address, _pdf(target, 1 + next(target.serial) % 7))


def _pdf(target: Target, num_fills: int) -> bytes:
    url = payloads.data_url(payloads.filled_pdf(num_fills), "pdf", "application")
    return _chat(target, [{"type": "file", "file": {"filename": "a.pdf", "file_data": url}}], max_tokens=1)


LARGEST = upload_of(payloads.MAX_BODY_BYTES)

ATTACKS = {
    "tarpit": Attack(64, 1.0, tarpit, quick_host, holds=True),
    "dripping hosts": Attack(24, 1.0, dripping_host, quick_host, holds=True),
    "stalling hosts": Attack(24, 1.0, stalling_host, quick_host, holds=True),
    "failing among slow siblings": Attack(2, 3.0, siblings, quick_host),
    "dripped heads": Attack(32, 1.0, dripped_head, text, holds=True),
    "dripped bodies": Attack(16, 1.0, dripped_body, text, holds=True),
    "dripped chunks": Attack(16, 1.0, dripped_chunks, text, holds=True),
    "silent connections": Attack(32, 1.0, silence, text, holds=True),
    "held connections": Attack(payloads.MAX_CONNECTIONS + 100, 4.0, dripped_body, text, holds=True),
    "pipelined resets": Attack(8, 0.5, pipelined, text),
    "unread streams": Attack(8, 60.0, unread_stream, read_stream, holds=True),
    "unread samples": Attack(4, 60.0, unread_samples, read_samples, holds=True),
    "unread downloads": Attack(40, 5.0, unread_download, download, (REQUESTS, FILES), holds=True),
    "unread texts": Attack(20, 5.0, unread_detokenized, detokenized, holds=True),
    "stored conversation": Attack(50, 5.0, stored_conversation, quick_conversation, (REQUESTS, RESPONSES), holds=True),
    "many samples": Attack(3, 1.0, many_samples, many_chats),
    "stop strings": Attack(2, 0.5, stop_strings, many_short_samples),
    "stop strings of prompts": Attack(2, 0.5, many_prompts, many_short_prompts),
    "whole log probabilities": Attack(2, 1.0, whole_logprobs, streamed_logprobs),
    "new schemas": Attack(4, 0.5, new_schema, known_schema),
    "refused requests": Attack(20, 0.2, _sent(_refused), text),
    "maximal bodies": Attack(2, 2.0, _sent(_maximal), LARGEST),
    "abandoned bodies": Attack(2, 2.0, abandoned, LARGEST),
    "bodies without strings": Attack(2, 2.0, _sent(_objects), LARGEST),
    "bombs": Attack(2, 2.0, _sent(_bombs), _sent(_images), (REQUESTS, PIXELS)),
    "encoded bombs": Attack(2, 2.0, _sent(_encoded_bombs), _sent(_images)),
    "slow PDFs": Attack(3, 1.0, slow_pdf, quick_pdf, (REQUESTS, PIXELS)),
    "a worker's descriptions": Attack(
        1, 0.2, by_worker.changed_description, by_worker.same_description, (), is_by_worker=True
    ),
    "a worker's long frames": Attack(1, 0.2, by_worker.long_frames, by_worker.load_frame, (), is_by_worker=True),
    "a worker's idle frames": Attack(1, 0.2, by_worker.idle_frames, by_worker.one_ping, (), is_by_worker=True),
    "a worker's cache events": Attack(1, 0.2, by_worker.published_batches, by_worker.one_batch, (), is_by_worker=True),
}
"""By name. Each is a row of a siege; the last row has all by clients at once."""


def address_of(name: str) -> str:
    """Return the loopback address that an attack connects from."""
    return f"127.0.1.{list(ATTACKS).index(name) + 1}"
