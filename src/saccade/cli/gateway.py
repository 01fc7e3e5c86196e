"""`saccade gateway`: the HTTP side by itself."""

import logging

import uvloop

from saccade.cli.flags import (
    MEDIA_FLAGS,
    SERVER_FLAGS,
    LogLevel,
    Many,
    MediaFlags,
    ServerFlags,
    default_name,
    gateway_config,
)
from saccade.errors import StartupError
from saccade.gateway import app
from saccade.gateway.model_probe import ModelProbe
from saccade.models.files import read_model_files
from saccade.protocol.description import ModelFiles
from saccade.supervisor.checkpoint import resolve_model
from saccade.telemetry import configure_logging
from saccade.transport.dialects.tokenspeed import SCHEME
from saccade.transport.wire import target


def gateway(
    *,
    worker_url: Many = (),
    model: Many = (),
    server: ServerFlags = SERVER_FLAGS,
    media: MediaFlags = MEDIA_FLAGS,
    log_level: LogLevel = "INFO",
) -> None:
    """Serve the OpenAI API over workers that run elsewhere.

    Parameters
    ----------
    worker_url
        A worker: grpc://host:port or unix:/path, tokenspeed://host:port for one of TokenSpeed; may be given many times.
    model
        Files of a served model, a folder in hub layout or a hub id, instead of those that its workers send; as
        NAME=MODEL where the workers call it otherwise. May be given many times.
    log_level
        The least that is logged.
    """
    if not worker_url:
        raise StartupError("A gateway needs at least one --worker-url, as grpc://host:port.")
    for url in worker_url:
        target(url.replace(SCHEME, "grpc://", 1))
    configure_logging(logging.getLevelNamesMapping()[log_level])
    models = dict(map(_given, model))
    uvloop.run(app.serve(gateway_config(server, media, worker_url), models))


def _given(model: str) -> tuple[str, ModelFiles]:
    """Return a model's name and files; what is wrong with them shows now, not at the first request."""
    name, _, source = model.rpartition("=")
    folder = resolve_model(source, weights=False)
    name = name or default_name(source, folder)
    files = read_model_files(folder)
    ModelProbe(name, files).run()
    return name, files
