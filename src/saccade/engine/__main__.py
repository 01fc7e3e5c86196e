"""`python -m saccade.engine --fd N`: one engine, speaking over the socket N. EngineConfig comes as JSON."""

import argparse
import logging
import os
import signal
import socket
import sys

import msgspec
import structlog

from saccade.engine.config import EngineConfig
from saccade.engine.process import run
from saccade.protocol.local import EngineFailed
from saccade.telemetry import configure_logging
from saccade.transport.framing import UNREADABLE, ChannelClosed
from saccade.transport.lifeline import tie_to_parent
from saccade.transport.local import EngineChannel

logger = structlog.get_logger(__name__)


def main() -> int:
    """Serve one front; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m saccade.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the engine's end of a Unix stream socket pair")
    parser.add_argument("--config", help="EngineConfig as JSON; read from standard input where absent")
    parser.add_argument("--log-level", default="INFO", choices=tuple(logging.getLevelNamesMapping()))
    arguments = parser.parse_args()
    configure_logging(logging.getLevelNamesMapping()[arguments.log_level])
    tie_to_parent(signal.SIGKILL)
    # Ctrl-C reaches the whole terminal; the front decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    content = sys.stdin.buffer.read() if arguments.config is None else os.fsencode(arguments.config)
    try:
        channel = EngineChannel(socket.socket(fileno=arguments.fd))
        try:
            config = msgspec.json.decode(content, type=EngineConfig)
        except UNREADABLE:
            channel.send(EngineFailed("The engine's configuration is not valid JSON of EngineConfig."))
            return 1
        return run(config, channel)
    except ChannelClosed:
        # Slots belong to gateways, who free them when their worker goes; nothing else outlives this process.
        logger.info("the front is gone; the engine ends")
        return 0


if __name__ == "__main__":
    sys.exit(main())
