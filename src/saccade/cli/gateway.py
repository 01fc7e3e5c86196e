"""`saccade gateway`: the HTTP side by itself."""

import logging

import uvloop

from saccade.cli.flags import MEDIA_FLAGS, SERVER_FLAGS, LogLevel, Many, MediaFlags, ServerFlags, gateway_config
from saccade.errors import StartupError
from saccade.gateway import app
from saccade.telemetry import configure_logging
from saccade.transport.wire import target


def gateway(
    *,
    worker_url: Many = (),
    server: ServerFlags = SERVER_FLAGS,
    media: MediaFlags = MEDIA_FLAGS,
    log_level: LogLevel = "INFO",
) -> None:
    """Serve the OpenAI API over workers that run elsewhere.

    Parameters
    ----------
    worker_url
        A worker, grpc://host:port or unix:/path; may be given many times.
    log_level
        The least that is logged.
    """
    if not worker_url:
        raise StartupError("A gateway needs at least one --worker-url grpc://host:port.")
    for url in worker_url:
        target(url)
    configure_logging(logging.getLevelNamesMapping()[log_level])
    uvloop.run(app.serve(gateway_config(server, media, worker_url)))
