"""Command lines of `vllm serve` start a server that answers about an image. # F15

Each gets a tiny checkpoint of its family with dummy weights, two ranks or copies at most, and an address of its own.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from chats import openai_messages, random_image
from server import serving
from vllm_lines import FOLDER, LINES, REFUSED, TEMPLATE

pytestmark = pytest.mark.conformance

NUM_POSITIONS: Final = 262144
"""As many as releases have, since lines ask for contexts of this length."""

FEW_LAYERS: Final = {"num_key_value_heads": 1, "num_hidden_layers": 2}
ONE_WITH_ATTENTION: Final = {"num_key_value_heads": 1, "layer_types": [*["linear_attention"] * 4, "full_attention"]}
SIZES: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "R3": {"text_config": {"head_dim": 128, **FEW_LAYERS}, "vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "R12": {"text_config": {"head_dim": 256, **ONE_WITH_ATTENTION}},
}
"""Heads of the releases' size, for which these lines divide the rotation, and few, so that a million tokens fit."""

ADDRESS: Final = ("--host", "--port")
SPLITS: Final = ("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp")


def write_release(checkpoint: Path, folder: Path, sizes: Mapping[str, Mapping[str, Any]]) -> Path:
    """Copy *checkpoint* to *folder*, with the positions of a release and other *sizes* of its networks."""
    shutil.copytree(checkpoint, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.get("text_config", config)["max_position_embeddings"] = NUM_POSITIONS
    for part, values in sizes.items():
        config[part] |= values
    file.write_text(json.dumps(config))
    return folder


def shortened(words: Iterable[str]) -> list[str]:
    """Return *words* without an address, with two ranks or copies at most, and with small dummy weights."""
    pending, short = iter(words), list[str]()
    for word in pending:
        if word in ADDRESS:
            next(pending)
        elif word in SPLITS:
            short += [word, str(min(int(next(pending)), 2))]
        else:
            short.append(word)
    given = {word.partition("=")[0] for word in short}
    defaults = {"--load-format": "dummy", "--dtype": "bfloat16"}
    return short + [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]


@pytest.mark.parametrize("name", sorted(LINES.keys() - REFUSED))
def test_line_starts_a_server_that_answers(name: str, network_folder: Callable[[str], Path], tmp_path: Path) -> None:
    line = LINES[name]
    folder = write_release(network_folder(line.checkpoint), tmp_path / "model", SIZES.get(name, {}))
    template = folder / "chat_template.jinja"
    words = line.with_stand_ins({"M": str(folder), TEMPLATE: str(template), FOLDER: str(tmp_path)})
    key = words[words.index("--api-key") + 1] if "--api-key" in words else "none"
    parts = ("What is it?",) if "--language-model-only" in words else (random_image(64, 64, 1), "What is it?")
    with serving(*shortened(words), key=key, log=tmp_path / "log") as server:
        answer = server.client().chat.completions.create(
            model=server.name, messages=openai_messages(*parts), max_tokens=4
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
