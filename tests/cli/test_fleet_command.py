"""What `saccade fleet` starts on the nodes of a cluster."""

from pathlib import Path

import pytest
from tables import table

from saccade.cli.fleet import worker_arguments
from saccade.engine.config import EngineSettings


@table("model, named", [(None, []), ("acme/model", ["acme/model"]), ("folder", ["{}/folder"])])
def test_workers_serve_the_model_of_the_command_or_the_bundled_one(
    model: str | None, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    words = worker_arguments(model, tmp_path / "token", 30.0, EngineSettings(), "INFO")
    before = words[: words.index("--worker-token-file")]
    assert list(before) == [word.format(tmp_path) for word in named]
