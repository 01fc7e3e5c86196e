"""The names that a model has in the API."""

from pathlib import Path

import pytest

from saccade.cli.flags import default_name


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("models/Qwen3-VL-2B", "Qwen3-VL-2B"),
        ("hub/models--PaddlePaddle--PaddleOCR-VL/snapshots/0f1e", "PaddlePaddle/PaddleOCR-VL"),
        ("hub/models--someone--model--of--many-words/snapshots/0f1e", "someone/model--of--many-words"),
        ("other/snapshots/0f1e", "0f1e"),
    ],
)
def test_a_folder_of_a_hubs_cache_is_called_by_its_hub_id(folder: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)

    assert default_name(str(path), path) == name


def test_a_hub_id_is_a_name() -> None:
    assert default_name("owner/name", Path("hub/models--owner--name/snapshots/0f1e")) == "owner/name"
