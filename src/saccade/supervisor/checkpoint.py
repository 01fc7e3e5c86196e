"""Finds a model's files: a local folder, or a hub id that is fetched once, before any engine starts."""

import os
import re
from pathlib import Path

from saccade.errors import StartupError
from saccade.protocol.model_files import check_config

WEIGHTS = "*.safetensors"
FETCHED_FILES = ("*.json", "*.jinja", "*.model", "tiktoken*", "*.tiktoken", "vocab*", "merges.txt")
REFUSED_FILES = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.msgpack", "*.h5")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def resolve_model(
    name: str, *, weights: bool = True, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """Return the folder of the model *name*: a local folder with config.json, or a hub id `owner/name[@revision]`.

    *revision* is another way to give the revision, and *download_dir* replaces the hub's cache. A name that is a local
    path is never looked up on the hub. HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN are honoured. Code and pickled weights
    are never fetched, other weights only with *weights*. Raises a StartupError that names the folder or repository, and
    the cause.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_config(folder, str(folder))
        if revision is not None:
            raise StartupError(f"--revision is for a model on a hub; {folder} is a folder of this machine.")
        return folder.resolve()
    if folder.exists():
        raise StartupError(f"{folder} is a file; a model is a folder with config.json, or a hub id.")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name:
        raise StartupError(f"There is no folder {folder}.")
    if revision is not None and "@" in name:
        raise StartupError(f"{name} names a revision, and so does --revision; give one of them.")
    try:
        return fetch(f"{name}@{revision}" if revision else name, weights=weights, download_dir=download_dir)
    except StartupError as error:
        raise StartupError(f"There is no folder {folder} here. {error.message}") from error


def fetch(name: str, *, weights: bool = True, download_dir: str | None = None) -> Path:
    """Fetch the hub id *name* as resolve_model does, and return its folder in the cache. Raises StartupError."""
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    repository, revision = _repository(name)
    patterns = [*FETCHED_FILES, WEIGHTS] if weights else list(FETCHED_FILES)
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            cache_dir=Path(download_dir).expanduser() if download_dir else None,
            allow_patterns=patterns,
            ignore_patterns=list(REFUSED_FILES),
        )
    except (OSError, ValueError, HTTPError, EntryNotFoundError) as error:
        raise StartupError(f"The model {repository} could not be fetched: {_cause(error, revision)}") from error
    check_config(Path(folder), f"The repository {repository}")
    return Path(folder)


def _repository(name: str) -> tuple[str, str | None]:
    repository, _, revision = name.partition("@")
    if not HUB_ID.fullmatch(repository) or ".." in name:
        raise StartupError(f"{name!r} is neither a folder here nor a hub id of the form owner/name.")
    return repository, revision or None


def _cause(error: Exception, revision: str | None) -> str:
    """Return a sentence that explains an error of the hub's client."""
    import httpx2
    from huggingface_hub import constants, errors

    match error:
        case errors.GatedRepoError():
            return "it is gated; ask for access on its page and set HF_TOKEN."
        case errors.RepositoryNotFoundError() | errors.HfHubHTTPError(response=httpx2.Response(status_code=401)):
            return "there is no such repository, or it is private and HF_TOKEN does not open it."
        case errors.RevisionNotFoundError():
            return f"it has no revision {revision!r}."
        case errors.HfHubHTTPError(response=response):
            return f"{constants.ENDPOINT} answered {response.status_code} for {response.url.path}."
        case errors.LocalEntryNotFoundError() if constants.is_offline_mode():
            return "HF_HUB_OFFLINE is set and its files are not all in the local cache."
        case errors.LocalEntryNotFoundError():
            return f"{constants.ENDPOINT} could not be reached and its files are not all in the local cache."
        case OSError(errno=int(number), filename=filename) if number:
            return f"{os.strerror(number)} ({filename or constants.HF_HUB_CACHE})."
        case _:
            return f"the connection to {constants.ENDPOINT} broke; run the command again, what has arrived is kept."
