"""Rank 0's commands to the other ranks, and their replies, as length-framed msgpack over a Unix socket pair."""

import socket
from typing import NoReturn

import msgspec
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import PromptScores, StepInput
from saccade.transport import framing
from saccade.transport.framing import PREFIX_BYTES, ChannelClosed


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load this rank's part of the weights. The rank answers with a Reply."""

    config: EngineConfig


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Connect to the other ranks."""


class Measure(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Compute how many blocks fit on the rank's device. The rank answers with a Reply."""


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Replace the caches with new ones of *num_blocks* blocks."""

    num_blocks: int


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Forget all rows and encoder outputs; with *captures*, capture the decodes' CUDA graphs, if the engine has any."""

    captures: bool


class PixelsPlace(msgspec.Struct, frozen=True, array_like=True):
    """The pixels of an encoder output are bytes [start, start + num_bytes) of the arena."""

    output_id: int
    start: int
    num_bytes: int


class Launch(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """Compute a step, and the logits that rank 0 draws from and scores prompts with; receive the tokens that it draws.

    Images with *places* have their pixels in the arena.
    """

    step: StepInput
    places: tuple[PixelsPlace, ...]
    prompt_scores: tuple[PromptScores, ...] = ()


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """End this rank."""


Command = LoadWeights | Join | Measure | Allocate | Renew | Launch | Leave


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The rank has carried out a command, and *num_blocks* fit on its device if it measured them.

    If *failure* is not empty, the rank cannot start, and *failure* is a sentence for the operator.
    """

    num_blocks: int = 0
    failure: str = ""


def _refuse(value: object) -> NoReturn:
    """Raise TypeError for a value that msgpack cannot express; msgspec calls this."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"A tensor on {value.device} cannot cross a process border: grids and other metadata are numbers and bytes "
            "of the host."
        )
    raise TypeError(f"{type(value).__name__} cannot cross a process border.")


def encode(message: Command | Reply) -> bytes:
    """Return *message* as a frame. Raises TypeError if it has a value that cannot be sent, such as a tensor."""
    return framing.framed(msgspec.msgpack.encode(message, enc_hook=_refuse))


class Link:
    """One end of the connection between rank 0 and another rank.

    All methods block, and raise ChannelClosed if the other rank is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send_frame(self, frame: bytes) -> None:
        try:
            self._connection.sendall(frame)
        except OSError as error:
            raise ChannelClosed from error

    def command(self) -> Command:
        command: Command = msgspec.msgpack.decode(self._receive(), type=Command)
        return command

    def reply(self) -> Reply:
        """Return the next reply of the other rank."""
        return msgspec.msgpack.decode(self._receive(), type=Reply)

    def close(self) -> None:
        self._connection.close()

    def _receive(self) -> bytearray:
        try:
            prefix = framing.receive(self._connection, PREFIX_BYTES)
            payload = framing.receive(self._connection, framing.length(prefix))
        except OSError as error:
            raise ChannelClosed from error
        if len(prefix) < PREFIX_BYTES or len(payload) < framing.length(prefix):
            raise ChannelClosed
        return payload
