"""What an image costs, against the engine's own sizes."""

from collections.abc import Callable
from pathlib import Path

import torch
from tables import table

from saccade import models
from saccade.cli.costs import image_cost
from saccade.engine.executor.memory import block_bytes, state_bytes
from saccade.models.files import engine_config, parse_json, read_model_files


@table("name", ["qwen3_vl", "qwen3_5", "kimi_k25", "llava_next"])
def test_costs_are_those_that_the_engine_allocates(name: str, network_folder: Callable[[str], Path]) -> None:
    files = read_model_files(network_folder(name))
    family = models.family_of(parse_json(files, "config.json"))
    spec = models.load_spec(family, engine_config(files, models.families()[family]))
    cost = image_cost(files, "bfloat16", size=(96, 64))
    assert cost.num_tokens > 0
    assert cost.num_patches > 0
    assert cost.kv_bytes == block_bytes(spec.kv_specs, cost.num_tokens, torch.bfloat16)
    assert cost.checkpoint_bytes == state_bytes(spec.kv_specs, torch.bfloat16)
    assert (cost.checkpoint_bytes > 0) is (family == "qwen3_5")
    assert cost.encoder_bytes % (2 * cost.num_tokens) == 0
    in_fp8 = image_cost(files, "bfloat16", "float8_e4m3fn", (96, 64))
    assert (2 * in_fp8.kv_bytes, in_fp8.encoder_bytes) == (cost.kv_bytes, cost.encoder_bytes)


def test_layers_with_a_window_keep_as_much_of_an_image_as_it_has(checkpoint: Callable[[str], Path]) -> None:
    files = read_model_files(checkpoint("gemma4"))
    spec = models.load_spec("gemma4", engine_config(files, models.families()["gemma4"]))
    cost = image_cost(files, "bfloat16", size=(96, 96))
    assert cost.num_tokens > 40
    of_all, of_window = ([one for one in spec.kv_specs if one.window == window] for window in (None, 40))  # type: ignore[union-attr]
    expected = block_bytes(of_all, cost.num_tokens, torch.bfloat16) + block_bytes(of_window, 40, torch.bfloat16)
    assert cost.kv_bytes == expected
