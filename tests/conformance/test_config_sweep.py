"""Another value of a key is computed as by the reference, or refused: none is ignored without a word. # A1, A9

A sample of keys and values for each checkpoint, which rotates by the seed of the suite's samples. CONFORMANCE_SEED=N
repeats one, and SWEEP_SIZE=N takes more of them.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import engines
import pytest
from checkpoints import NETWORKS, TEXTS
from conformance_sample import SEED
from oracle_checks import check
from references.networks import ORACLES, TextOracle

from saccade.errors import SaccadeError, StartupError

SIZE = int(os.environ.get("SWEEP_SIZE", "4"))
OUTSIDE = {"model_type", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings"}
"""Names of things, and the key that the head's own tests are about."""

Change = tuple[str, str, Any]


def other_values(value: Any) -> list[Any]:
    """Return values of the kind of *value*."""
    match value:
        case bool():
            return [not value]
        case int():
            return sorted({value + 1, value * 2, value // 2, max(value - 1, 0)} - {value})
        case float():
            return [value * 4, value / 4] if value >= 1e-3 else [0.05]
        case str():
            return ["other", *({"silu", "gelu"} - {value})]
    return []


def changes(config: dict[str, Any]) -> Iterator[Change]:
    """Yield each section, key and other value of *config*."""
    for section in ("text_config", "vision_config"):
        own = config.get(section)
        if section == "text_config" and own is None:
            section, own = "", config
        for key in sorted((own or {}).keys() - OUTSIDE):
            if section or not key.endswith(("token_id", "token_index")):
                yield from ((section, key, value) for value in other_values(own[key]))


def changed(folder: Path, target: Path, change: Change) -> Path:
    """Return a copy of the checkpoint in *folder* with the change in config.json."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    config = deepcopy(json.loads((folder / "config.json").read_text()))
    section, key, value = change
    (config[section] if section else config)[key] = value
    (target / "config.json").write_text(json.dumps(config))
    return target


def fault(name: str, folder: Path) -> str:
    """Return how the checkpoint in *folder* is not answered as by the reference; nothing if it is, or is refused."""
    try:
        subject = engines.engine(folder)
        logits = engines.record_logits(subject)
        asked = engines.request(folder, [45] if name in TEXTS else [5, ((64, 64), 1), 40], max_tokens=3)
    except StartupError:
        return ""
    except SaccadeError as error:
        return f"it starts, and an image is then refused: {error.message}"
    try:
        oracle = TextOracle(folder) if name in TEXTS else ORACLES[name](folder)
        oracle.logits(asked, [1, 2])
    except Exception:  # the reference refuses it in its own ways
        return ""
    answer = engines.drain(subject, asked).answers[asked.request_id].token_ids
    try:
        check(oracle, asked, answer, logits[asked.request_id])
    except AssertionError as error:
        return f"it answers otherwise: {str(error).splitlines()[0]}"
    return ""


@pytest.mark.conformance
@pytest.mark.parametrize("name", [*NETWORKS, *TEXTS])
def test_other_values_are_computed_or_refused(name: str, network_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = network_folder(name)
    every = list(changes(json.loads((folder / "config.json").read_text())))
    seed = os.environ[SEED]
    sample = random.Random(seed).sample(every, min(SIZE, len(every)))
    print(f"{SEED}={seed}: {len(sample)} of {len(every)} changes of {name}")
    found = {
        change: fault(name, changed(folder, tmp_path / str(number), change)) for number, change in enumerate(sample)
    }
    assert {change: why for change, why in found.items() if why} == {}, f"{SEED}={seed}"
