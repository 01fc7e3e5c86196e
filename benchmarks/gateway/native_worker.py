"""A worker of Saccade's own wire without an engine: `python -m benchmarks.gateway.native_worker FOLDER --port N`.

Like an engine it copies the pixels out of shared memory, in a thread of its own, before it says that they are released
and answers; the receipt is stamped when the request arrives. Long answers are streamed: every step is a frame with one
token of each.
"""

import argparse
import asyncio
import concurrent.futures
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from benchmarks.gateway.receipt import RECEIPT_TOKENS, STEP_SECONDS, Receipts, now_ns
from saccade.identity.content import files_digest
from saccade.models.files import read_model_files
from saccade.protocol.description import Description
from saccade.protocol.output import FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import EngineRequest, GatewayCommand
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.server import WorkerServer
from saccade.transport.shared_memory import namespace, read_slot


@dataclass(frozen=True)
class Stream:
    """The tokens of a long answer that are still to be sent."""

    connection: GatewayStream
    request_id: str
    num_tokens: int
    token_ids: Iterator[tuple[int, int]]


class NotesFront:
    """Answers every request with its receipt, once its pixels are copied."""

    def __init__(self, folder: Path, model: str) -> None:
        files = read_model_files(folder)
        self._description = Description(
            model=model,
            fingerprint=files_digest(files.files),
            files=files,
            max_model_len=262144,
            max_num_seqs=256,
            block_size=16,
            num_blocks=1 << 16,
            dtype="bfloat16",
            device="none",
            shm_namespace=namespace(),
            version="none",
        )
        self._receipts = Receipts(folder)
        self._commands = msgspec.msgpack.Decoder(GatewayCommand)
        self._encoder = msgspec.msgpack.Encoder()
        self._engine = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._num_connections = 0
        self._streams: list[Stream] = []

    async def step(self) -> None:
        """Send a token of every long answer in each step, one frame to each gateway."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            deltas: dict[GatewayStream, list[TokenDelta]] = {}
            for stream in self._streams:
                number, token_id = next(stream.token_ids)
                reason = FinishReason.LENGTH if number == stream.num_tokens else None
                deltas.setdefault(stream.connection, []).append(TokenDelta(stream.request_id, [token_id], reason))
                if reason is not None:
                    ended = stream
                    self._streams = [one for one in self._streams if one is not ended]
            for connection, own in deltas.items():
                connection.send(self._encoder.encode(StepFrame(own, [])))

    def describe(self) -> bytes:
        """Return the encoded Description."""
        return self._encoder.encode(self._description)

    def open(self, frames: Frames | None = None) -> GatewayStream:
        """Return a new connection."""
        self._num_connections += 1
        return GatewayStream(self._num_connections, frames)

    def receive(self, connection: GatewayStream, command: bytes) -> None:
        """Take one command; an abort comes too late for anything."""
        received_ns = now_ns()
        request = self._commands.decode(command)
        if not isinstance(request, EngineRequest):
            return
        if request.sampling.max_tokens > RECEIPT_TOKENS:
            num_tokens = request.sampling.max_tokens
            token_ids = self._receipts.streamed(received_ns, len(command), num_tokens)
            self._streams.append(Stream(connection, request.request_id, num_tokens, iter(enumerate(token_ids, 1))))
            return
        slots = [item.slot for item in request.media if item.slot is not None]
        receipt = self._receipts.ids(received_ns, len(command) + sum(slot.nbytes for slot in slots))
        delta = TokenDelta(request.request_id, receipt, FinishReason.STOP)
        frame = self._encoder.encode(StepFrame([delta], [slot.name for slot in slots]))
        if not slots:
            connection.send(frame)
            return
        loop = asyncio.get_running_loop()
        copied = loop.run_in_executor(self._engine, lambda: [read_slot(slot) for slot in slots])
        copied.add_done_callback(lambda done: (done.result(), connection.send(frame)))

    def hang_up(self, connection: GatewayStream) -> None:
        """Have nothing to clean up."""


async def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    front = NotesFront(arguments.folder, arguments.model)
    server = WorkerServer(front, f"127.0.0.1:{arguments.port}")
    await server.start()
    server.set_ready(True)
    print("listening", flush=True)
    await front.step()


if __name__ == "__main__":
    uvloop.run(main())
