"""What ships inside the package. # F8"""

import importlib.util
from pathlib import Path

from saccade.cli.bundled import bundled
from saccade.cli.demo import QUESTIONS

HUB_LAYOUT = {
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}
MAX_BYTES = 20_000_000


def test_model_is_small_and_whole() -> None:
    sizes = {path.name: path.stat().st_size for path in bundled("model").iterdir()}
    assert set(sizes) == {*HUB_LAYOUT, "README.md"}
    assert sum(sizes.values()) <= MAX_BYTES


def test_there_are_images_to_ask_about() -> None:
    assert all(list(bundled("images").glob(f"{kind}/*.png")) for kind in QUESTIONS)


def test_chat_template_is_the_one_that_training_writes() -> None:
    path = Path(__file__).parents[2] / "scripts/train_demo/tokenizer.py"
    spec = importlib.util.spec_from_file_location("train_demo_tokenizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (bundled("model") / "chat_template.jinja").read_text() == module.CHAT_TEMPLATE
