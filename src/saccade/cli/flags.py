"""The flags that commands share, made from settings. A flag that means the same as one of `vllm serve` has its name."""

from pathlib import Path
from typing import Literal

from saccade.cli.bundled import bundled
from saccade.engine.config import EngineConfig, EngineSettings
from saccade.errors import StartupError
from saccade.gateway.config import MediaSettings, ServerSettings, tls_context
from saccade.gateway.tenants.api_keys import flag_keys, read_keys_file
from saccade.gateway.tenants.key_table import MAX_BYTES
from saccade.models.bundled_model import BUNDLED_NAME
from saccade.models.files import read_chat_template
from saccade.supervisor.checkpoint import resolve_model
from saccade.supervisor.tree import answers_ready
from saccade.watched_file import WatchedFile

OWN = ("--served-model-name", "--trust-remote-code")
"""Flags that a worker's parent passes itself, or not at all."""

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
SERVER, MEDIA, ENGINE = ServerSettings(), MediaSettings(), EngineSettings()
"""Every flag at its default."""


def model_folder(model: str | None, flags: EngineSettings) -> Path:
    """Return the folder of *model*, or of the bundled one if that is None. Raises StartupError."""
    return resolve_model(
        str(bundled("model")) if model is None else model,
        weights=flags.load_format != "dummy",
        revision=flags.revision,
        download_dir=flags.download_dir,
    )


def served_names(model: str | None, folder: Path, flags: EngineSettings) -> tuple[str, ...]:
    """Return the model's names in the API, without duplicates: the flag's, or else the default one.

    Raises StartupError for an empty name, or if there is no *model* but the last name looks like one.
    """
    names = flags.served_model_name
    if not all(name.strip() for name in names):
        raise StartupError("--served-model-name is empty; give the name that requests have as `model`.")
    if model is None and len(names) > 1 and ("/" in names[-1] or Path(names[-1]).expanduser().is_dir()):
        raise StartupError(
            f"--served-model-name takes all words after it, so {names[-1]} was read as a name. Write MODEL first, as "
            f"in `saccade serve {names[-1]} --served-model-name {' '.join(names[:-1])}`."
        )
    return tuple(dict.fromkeys(names)) or (BUNDLED_NAME if model is None else default_name(model, folder),)


def default_name(model: str, folder: Path) -> str:
    """Return a model's default name: the hub id, which a folder in a hub's cache has too, or else the folder's name."""
    if not Path(model).expanduser().is_dir():
        return model
    match folder.parts:
        case [*_, repository, "snapshots", _] if repository.startswith("models--"):
            return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def check_without_model(flags: EngineSettings) -> None:
    """Raise StartupError for settings that cannot work with any model, before one is fetched."""
    EngineConfig("", "", **vars(flags)).check()


def engine_config(model: str | None, folder: Path, flags: EngineSettings) -> EngineConfig:
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
