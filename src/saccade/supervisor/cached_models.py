"""Lists the models in the hub's cache."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CachedModel:
    """A model in the hub's cache: its hub id, its newest usable folder, and the disk space of all its revisions."""

    name: str
    folder: Path
    num_bytes: int


def cached_models() -> list[CachedModel]:
    """Return the models in the hub's cache that have a config.json, sorted by name."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = []
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        revisions = sorted(repository.revisions, key=lambda revision: revision.last_modified)
        folders = [one.snapshot_path for one in revisions if (one.snapshot_path / "config.json").is_file()]
        if repository.repo_type == "model" and folders:
            models.append(CachedModel(repository.repo_id, folders[-1], repository.size_on_disk))
    return models
