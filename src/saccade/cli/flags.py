"""What the commands make of settings. A flag that means the same as one of `vllm serve` has its name."""

from pathlib import Path
from typing import Literal

from saccade.engine.config import EngineConfig, EngineSettings
from saccade.gateway.config import MediaSettings, ServerSettings
from saccade.gateway.server.tls import tls_context
from saccade.gateway.tenants.api_keys import MAX_BYTES, flag_keys, read_keys_file
from saccade.models.files import read_chat_template
from saccade.supervisor.tree import answers_ready
from saccade.watched_file import WatchedFile

OWN = ("--served-model-name", "--trust-remote-code")
"""Flags that a worker's parent passes itself, or not at all."""

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
SERVER, MEDIA, ENGINE = ServerSettings(), MediaSettings(), EngineSettings()
"""Every flag at its default."""


def served_names(model: str, folder: Path, flags: EngineSettings) -> tuple[str, ...]:
    """Return the model's names in the API, without duplicates: the flag's, else that of default_name()."""
    return tuple(dict.fromkeys(flags.served_model_name)) or (default_name(model, folder),)


def default_name(model: str, folder: Path) -> str:
    """Return a model's default name: a hub id as given, else the folder's last part."""
    return folder.name if Path(model).expanduser().is_dir() else model


def engine_config(model: str, folder: Path, flags: EngineSettings) -> EngineConfig:
    """Return the settings of an engine. Raises StartupError for settings that cannot work."""
    name, *aliases = served_names(model, folder, flags)
    config = EngineConfig(str(folder), name, tuple(aliases), **vars(flags))
    config.check()
    return config


async def is_ready(server: ServerSettings) -> bool:
    """Whether the gateway with these settings answers /ready with 200."""
    return await answers_ready(server.host, server.port, uds=server.uds, over_tls=server.tls.certfile is not None)


def check_server_files(server: ServerSettings) -> None:
    """Raise StartupError if a file that *server* names is wrong, before anything is started."""
    tls_context(server.tls)
    read_chat_template(server.chat_template)
    if server.api_keys_file is not None:
        read_keys_file(WatchedFile(server.api_keys_file, MAX_BYTES), flag_keys(server.api_keys, server.admin_keys))
