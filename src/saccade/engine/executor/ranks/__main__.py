"""`python -m saccade.engine.executor.ranks`: one rank of an engine, started by rank 0."""

import argparse
import logging
import os
import signal
import socket
import sys

import structlog

from saccade.engine.executor.ranks.arena import PixelArena
from saccade.engine.executor.ranks.member import RankMember
from saccade.engine.executor.ranks.messages import Link
from saccade.log_setup import configure_logging, log_uncaught
from saccade.transport.framing import ChannelClosed

logger = structlog.get_logger(__name__)


def main() -> int:
    """Serve rank 0; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m saccade.engine.executor.ranks", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True, help="this rank's end of a Unix stream socket pair")
    parser.add_argument("--arena", type=int, required=True, help="the descriptor of the pixels' memory")
    parser.add_argument("--rendezvous", type=int, required=True, help="the descriptor of the file where ranks meet")
    parser.add_argument("--log-level", default="INFO", choices=tuple(logging.getLevelNamesMapping()))
    arguments = parser.parse_args()
    configure_logging(logging.getLevelNamesMapping()[arguments.log_level])
    structlog.contextvars.bind_contextvars(rank=arguments.rank)
    log_uncaught()
    # Ctrl-C signals every process of the terminal; the front decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arena = PixelArena(arguments.arena)
    os.close(arguments.arena)
    link = Link(socket.socket(fileno=arguments.fd))
    try:
        return RankMember(arguments.rank, link, arena, f"/proc/self/fd/{arguments.rendezvous}").run_commands()
    except ChannelClosed:
        logger.info("rank 0 is gone; this rank ends")
        return 0


if __name__ == "__main__":
    sys.exit(main())
