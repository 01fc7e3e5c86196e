"""`python -m saccade.engine --fd N`: run one engine, connected to its front by socket N. EngineConfig comes as JSON."""

import argparse
import logging
import os
import signal
import socket
import sys

import msgspec
import structlog

from saccade.engine.config import EngineConfig
from saccade.engine.process import run_engine
from saccade.log_setup import configure_logging, log_uncaught
from saccade.processes.parent_death import tie_to_parent
from saccade.protocol.engine_ipc import EngineFailed
from saccade.transport.engine_channel import EngineChannel
from saccade.transport.framing import UNREADABLE, ChannelClosed

logger = structlog.get_logger(__name__)


def main() -> int:
    """Serve the front until it ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m saccade.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the engine's end of a Unix stream socket pair")
    parser.add_argument("--config", help="EngineConfig as JSON; read from standard input if absent")
    parser.add_argument("--log-level", default="INFO", choices=tuple(logging.getLevelNamesMapping()))
    arguments = parser.parse_args()
    configure_logging(logging.getLevelNamesMapping()[arguments.log_level])
    log_uncaught()
    tie_to_parent(signal.SIGKILL)
    # Ctrl-C signals every process of the terminal; the front decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    content = sys.stdin.buffer.read() if arguments.config is None else os.fsencode(arguments.config)
    try:
        channel = EngineChannel(socket.socket(fileno=arguments.fd))
        try:
            config = msgspec.json.decode(content, type=EngineConfig)
        except UNREADABLE:
            channel.send(EngineFailed("The engine's configuration is not valid JSON of EngineConfig."))
            return 1
        return run_engine(config, channel)
    except ChannelClosed:
        # Slots belong to gateways, which free them when their worker ends; nothing else outlives this process.
        logger.info("the front is gone; the engine ends")
        return 0


if __name__ == "__main__":
    sys.exit(main())
