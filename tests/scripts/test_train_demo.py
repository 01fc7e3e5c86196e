"""The recipe of the bundled model: fair images, and a run that goes on where it stopped. # F8"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saccade.models.files import read_model_files

pytestmark = pytest.mark.ci


SCRIPT = Path(__file__).parents[2] / "scripts/train_demo"


@pytest.fixture(scope="module")
def pictures() -> Any:
    """The script's module that draws."""
    spec = importlib.util.spec_from_file_location("train_demo_pictures", SCRIPT / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_training_never_draws_a_text_of_the_evaluation(pictures: Any) -> None:
    texts = {split: {pictures.draw("text", seed, split).text for seed in range(400)} for split in ("train", "test")}
    assert not any(pictures.held_out(text) for text in texts["train"])
    assert all(pictures.held_out(text) for text in texts["test"] if len(text) > 1)
    assert {len(text) for text in texts["test"]} == {1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["text", "colour", "shape", "shape_colour"])
def test_a_seed_is_an_image(pictures: Any, kind: str) -> None:
    one, again, other = (pictures.draw(kind, seed) for seed in (1, 1, 2))
    assert one.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert (one.question, one.answer) == (again.question, again.answer)
    assert pictures.draw(kind, 1, "train").image.tobytes() != one.image.tobytes()


@pytest.mark.conformance  # a minute of training
def test_training_goes_on_where_it_stopped_and_writes_hub_layout(tmp_path: Path) -> None:
    def train(steps: int) -> str:
        command = [
            sys.executable,
            str(SCRIPT),
            "train",
            "--work",
            str(tmp_path / "run"),
            "--out",
            str(tmp_path / "out"),
        ]
        options = ["--eye-steps", "1", "--steps", str(steps), "--eager"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "continuing" not in train(2)
    assert "continuing at step 2" in train(3)
    assert json.loads((tmp_path / "run/progress.json").read_text())["step"] == 3
    found = set(read_model_files(tmp_path / "out").files)
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json"} <= found
    assert (tmp_path / "out/model.safetensors").is_file()
