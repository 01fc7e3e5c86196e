"""Start the other ranks' processes, send each the same commands, and end this process when one of them ends.

Rank 0 computes in the engine's process. So a single rank needs no further process, and tokens cross no process border
before they reach the front.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGKILL
from typing import NamedTuple

import structlog
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import SamplingInput, StepInput
from saccade.engine.executor.ranks import messages
from saccade.engine.executor.ranks.arena import PixelArena, create_arena
from saccade.errors import StartupError
from saccade.nn.parallel import ALONE, Ranks, join, leave
from saccade.processes.parent_death import tied
from saccade.processes.supervision import ending
from saccade.transport.framing import ChannelClosed

EXIT_SECONDS = 2.0
LOG_SECONDS = 0.2
DIED = 1

logger = structlog.get_logger(__name__)


class _Rank(NamedTuple):
    """Another rank's process."""

    number: int
    process: subprocess.Popen[bytes]
    link: messages.Link


class Peers:
    """The ranks other than 0. Without any, every method does nothing.

    When a rank ends by itself after `join`, this process ends: a collective that waits for it cannot be interrupted.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._others: list[_Rank] = []
        self._is_closing = False
        self._watches: list[threading.Thread] = []
        self._arena: PixelArena | None = None
        self._rendezvous = -1
        self._device = torch.device("cpu")

    def start(self, config: EngineConfig) -> None:
        """Start the processes, which load their weights."""
        if self.ranks.size == 1:
            return
        arena = create_arena()
        # Anonymous, so that no other user can reach it and nothing is left of it.
        self._rendezvous = os.memfd_create("saccade-ranks")
        try:
            self._arena = PixelArena(arena)
            for number in range(1, self.ranks.size):
                self._others.append(self._start_rank(number, arena))
        finally:
            os.close(arena)
        self._send(messages.LoadWeights(config))

    def _start_rank(self, number: int, arena: int) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = {
                "rank": number,
                "fd": theirs.fileno(),
                "arena": arena,
                "rendezvous": self._rendezvous,
                "log-level": logging.getLevelName(logging.getLogger().level),
            }
            command = [sys.executable, "-m", "saccade.engine.executor.ranks"]
            command += [f"--{name}={value}" for name, value in arguments.items()]
            process = subprocess.Popen(
                tied(command, SIGKILL), stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), arena, self._rendezvous)
            )
        return _Rank(number, process, messages.Link(ours))

    def join(self, device: torch.device) -> None:
        """Wait until every rank has loaded its weights, and connect them. Raises StartupError if one cannot start."""
        if not self._others:
            return
        self._replies()
        for other in self._others:
            watch = threading.Thread(target=self._watch, args=(other,), name=f"rank {other.number}", daemon=True)
            watch.start()
            self._watches.append(watch)
        self._device = device
        self._send(messages.Join())
        join(self.ranks, f"/proc/self/fd/{self._rendezvous}", device)

    def least_blocks(self, num_blocks: int) -> int:
        """Return the least of *num_blocks*, which fit on rank 0, and the other ranks' numbers. Raises StartupError."""
        self._send(messages.Measure())
        return min([num_blocks, *(reply.num_blocks for reply in self._replies())])

    def allocate(self, num_blocks: int) -> None:
        """Make the other ranks replace their caches with new ones of *num_blocks* blocks."""
        self._send(messages.Allocate(num_blocks))

    def renew(self, captures: bool) -> None:
        """Make the other ranks forget all rows and encoder outputs and, with *captures*, capture their graphs."""
        self._send(messages.Renew(captures))

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        """Make the other ranks compute *step* and its logits, and receive its tokens from rank 0."""
        if self._arena is not None:
            self._send(messages.Launch(*self._arena.store(step), sampling.prompt_scores))

    def close(self, *, is_in_step: bool = False) -> None:
        """End the processes; kill those that do not end in time. *is_in_step* means that a collective may hang."""
        self._is_closing = True
        if not self._others:
            return
        with contextlib.suppress(ChannelClosed):
            self._send(messages.Leave())
        for other in self._others:
            other.link.close()
        # NCCL would wait for a collective that does not end; the process that failed ends after this.
        if not (is_in_step and self._device.type == "cuda"):
            leave()
        for other in self._others:
            try:
                other.process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()
        for watch in self._watches:
            watch.join()
        self._others.clear()
        os.close(self._rendezvous)
        if self._arena is not None:
            self._arena.close()

    def _send(self, command: messages.Command) -> None:
        frame = messages.encode(command) if self._others else b""
        for other in self._others:
            other.link.send_frame(frame)

    def _replies(self) -> list[messages.Reply]:
        """Return the next reply of every rank. Raises StartupError for a failure, or if a rank has ended."""
        replies = []
        for other in self._others:
            try:
                replies.append(other.link.reply())
            except ChannelClosed as error:
                raise StartupError(f"Rank {other.number} {ending(other.process.wait())}.") from error
            if replies[-1].failure:
                raise StartupError(replies[-1].failure)
        return replies

    def _watch(self, other: _Rank) -> None:
        code = other.process.wait()
        if not self._is_closing:
            _end_process(f"Rank {other.number} {ending(code)}.")


def ranks_of(config: EngineConfig, rank: int = 0) -> Ranks:
    """Return *rank* among the ranks that *config* asks for."""
    size = config.tensor_parallel_size
    ranks = Ranks(rank, size, size > 1 and config.mm_encoder_tp_mode == "weights")
    return ranks.sharing_attention(config.attention_tensor_parallel_size or size)


@contextmanager
def closed_on_failure(peers: Peers) -> Iterator[Peers]:
    """Close *peers* if the block raises."""
    with contextlib.ExitStack() as stack:
        stack.callback(peers.close)
        yield peers
        stack.pop_all()


def _end_process(sentence: str) -> None:
    logger.error("a rank has ended, and the engine ends with it", reason=sentence)
    # Another thread writes the log.
    time.sleep(LOG_SECONDS)
    os._exit(DIED)
