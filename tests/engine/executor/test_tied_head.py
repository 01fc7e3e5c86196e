"""A head beside a configuration that says the embedding is the head: what the files hold counts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints import NETWORKS
from networks import config_of
from references.formats import REFERENCES
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from saccade.cli.bundled import bundled
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import load_model
from saccade.errors import StartupError
from saccade.models.backbones.text_network import TextNetwork
from saccade.nn.parallel import ALONE, Ranks

Tensors = dict[str, torch.Tensor]
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
TIED = "tie_word_embeddings"


def names_of(tensors: Tensors, network: Any) -> tuple[str, str]:
    """The names of the embedding, and of the head in the same form of names."""
    table = next(
        name for name in tensors if getattr(network.locate(name), "parameter", "").endswith(".embed_tokens.weight")
    )
    head = next((name for name in tensors if name in HEADS), None)
    return table, head or ("language_model." if table.startswith("language_model.model.") else "") + "lm_head.weight"


def load(folder: Path, ranks: Ranks = ALONE) -> Any:
    return load_model(EngineConfig(str(folder), "tiny", device="cpu", dtype="float32"), lambda *_: None, ranks).network


def tied(folder: Path, into: Path, level: str) -> tuple[Path, Tensors, str, str]:
    """A copy whose config.json says "tied" at *level*; its tensors, and the names of embedding and head."""
    copy = shutil.copytree(folder, into / "model")
    tensors = load_file(copy / "model.safetensors")
    table, head = names_of(tensors, load(copy))
    config = config_of(copy)
    for section in (config, config.get("text_config", {})):
        section.pop(TIED, None)
    (config if level == "top" else config.get("text_config", config))[TIED] = True
    if level == "text":  # where the top level decides, it says nothing else
        config.setdefault(TIED, True)
    (copy / "config.json").write_text(json.dumps(config))
    return copy, tensors, table, head


@pytest.mark.parametrize("level", ["top", pytest.param("text", marks=pytest.mark.ci)])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_head_counts_if_it_differs_from_the_embedding(
    name: str, level: str, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:  # A5, A10
    folder, tensors, table, head = tied(network_folder(name), tmp_path, level)
    other = torch.randn(tensors[table].shape, generator=torch.Generator().manual_seed(3))
    for ranks in (ALONE, Ranks(1, 2)):
        save_file({**tensors, head: other}, folder / "model.safetensors")
        with capture_logs() as logs:
            own = load(folder, ranks)
        assert [log["tensors"] for log in logs if TIED in log["event"]] == [[head]]
        assert torch.equal(own.lm_head.weight, other[-len(own.lm_head.weight) :])
        save_file({**tensors, head: tensors[table].clone()}, folder / "model.safetensors")
        with capture_logs() as logs:
            shared = load(folder, ranks)
        assert not [log for log in logs if TIED in log["event"]]
        assert shared.is_tied
        assert shared.lm_head.weight.data_ptr() == shared.language_model.embedding_VE.data_ptr()


@pytest.fixture
def copy(network_folder: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Tensors, str, str]:
    """A tied copy of a checkpoint."""
    return tied(network_folder("qwen3_vl"), tmp_path, "top")


def test_equal_is_what_rounds_to_equal_values(copy: tuple[Path, Tensors, str, str]) -> None:
    """A head in another dtype than the embedding is the same in the network's."""
    folder, tensors, table, head = copy
    rounded = tensors[table].bfloat16()
    save_file({**tensors, table: rounded.float(), head: rounded}, folder / "model.safetensors")
    assert load(folder).is_tied


def test_a_head_may_stand_alone(copy: tuple[Path, Tensors, str, str]) -> None:
    """It is the embedding, too: writers drop one of two equal tensors."""
    folder, tensors, table, head = copy
    values = tensors.pop(table)
    tensors.pop(head, None)
    save_file({**tensors, head: values}, folder / "model.safetensors")
    assert torch.equal(load(folder).language_model.embedding_VE, values)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"lacks 1 tensors: language_model\.embed_tokens\.weight"):
        load(folder)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_head_with_other_sizes_is_refused_by_name(copy: tuple[Path, Tensors, str, str], rows: int) -> None:
    folder, tensors, table, head = copy
    save_file({**tensors, head: tensors[table][:rows].clone()}, folder / "model.safetensors")
    with pytest.raises(StartupError, match=rf"{head} \(model\.safetensors\) has shape \[{rows}, "):
        load(folder)


@pytest.mark.parametrize("format", ["gptq", "fp8 tensor", "int4"])
def test_a_quantised_head_is_loaded(copy: tuple[Path, Tensors, str, str], format: str) -> None:
    folder, tensors, table, head = copy
    reference = REFERENCES[format]
    values = torch.randn(tensors[table].shape, generator=torch.Generator().manual_seed(3))
    tensors.pop(head, None)
    fields = reference.write(values)
    stored = {head.removesuffix("weight") + end: field for end, field in fields.items()}
    save_file({**tensors, **stored}, folder / "model.safetensors")
    if reference.in_own_file:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": reference.config}))
    else:
        (folder / "config.json").write_text(json.dumps({**config_of(folder), "quantization_config": reference.config}))
    expected = torch.from_numpy(reference.read(fields))
    assert torch.equal(load(folder).lm_head.dequantised(), expected)
    parts = [load(folder, Ranks(rank, 2)).lm_head.dequantised() for rank in range(2)]
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("choice", [None, "int8"])
def test_a_tied_embedding_is_in_memory_once(choice: str | None) -> None:
    """Of the bundled model in bfloat16: its vectors are read from the packed head, and answers stay the same."""
    folder = bundled("model")
    found = engines.engine(folder, dtype="bfloat16", quantization=choice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextNetwork, "share_head", lambda _: None)
        plain = engines.engine(folder, dtype="bfloat16", quantization=choice)
    sizes = [engines.module(one).language_model.embedding_VE.numel() for one in (found, plain)]
    assert sizes[1] > 0
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        assert sizes[0] == 0
    asked = engines.request(folder, [5, ((4, 8, 4), 1), 9])
    ours, theirs = (engines.drain(one, asked).answers["a"].token_ids for one in (found, plain))
    assert ours == theirs
