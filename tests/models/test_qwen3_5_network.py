"""Qwen3.5, dense and with experts: tower, names of tensors, configurations, ranks and number formats."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from checkpoints.quantised import quantise
from networks import build, check_features, config_of, load, with_value
from references.networks import QwenOracle
from safetensors.torch import load_file, save_file
from tables import table

from saccade import models
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.errors import StartupError
from saccade.models.network import Target
from saccade.models.qwen_vl import weights
from saccade.models.spec import Paged, Recurrent
from saccade.nn.backends.torch_sdpa import AttentionBackend
from saccade.nn.context import ForwardContext, PagedLayout
from saccade.nn.parallel import Ranks
from saccade.nn.rope import cos_sin

NAMES = ["qwen3_5", "qwen3_5_moe"]
SIZES = [(64, 64), (150, 100), (90, 230)]
LENGTHS = (1, 9, 70)
"""Tokens of the sequences of a step."""


class Silent(Ranks):
    """A rank whose sum over the ranks is its own part."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def tensors_for(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Link all files of *folder* but the weights into *target*; return the tensors."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).symlink_to(path)
    return load_file(folder / "model.safetensors")


def split_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Store each expert's matrices by themselves."""
    for name in [name for name in tensors if ".experts." in name]:
        experts, _, kind = name.rpartition(".")
        for index, matrix in enumerate(tensors.pop(name)):
            gate_up = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            for part, rows in (gate_up if kind == "gate_up_proj" else {"down_proj": matrix}).items():
                tensors[f"{experts}.{index}.{part}.weight"] = rows.contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_vision_tower_equals_the_reference(
    name: str, network: Callable[[str], Any], network_folder: Callable[[str], Path]
) -> None:  # A10
    check_features(QwenOracle(network_folder(name)), network_folder(name), SIZES, network(name), atol=1e-4)


def test_layers_have_the_state_of_their_kind(network: Callable[[str], Any]) -> None:
    dense, sparse = network("qwen3_5").spec, network("qwen3_5_moe").spec
    assert [isinstance(spec, Paged) for spec in dense.kv_specs] == [False, True, False, False, True]
    assert [isinstance(spec, Paged) for spec in sparse.kv_specs] == [False, True, False, True]
    assert dense.kv_specs[1] == Paged(2, 48, 48)
    recurrent = dense.kv_specs[0]
    assert isinstance(recurrent, Recurrent)
    assert recurrent.shapes == ((6, 12, 20), (3, 2 * 24 + 120))


def test_a_draft_layer_has_keys_and_values_and_the_last_hidden_state(network_folder: Callable[[str], Path]) -> None:
    config = config_of(network_folder("qwen3_5"))
    *layers, paged, last = models.load_spec("qwen3_5", {**config, "drafts": True}).kv_specs
    assert tuple(layers) == models.load_spec("qwen3_5", config).kv_specs
    assert paged == Paged(2, 48, 48)
    assert last == Recurrent(((104,), (3,)), ("network", "float32"))
    config["text_config"]["mtp_use_dedicated_embeddings"] = True
    with pytest.raises(StartupError, match="mtp_use_dedicated_embeddings"):
        models.load_spec("qwen3_5", {**config, "drafts": True})


def context(spec: Any, ranks: Ranks, device: str = "cpu") -> ForwardContext:
    """A step of fresh sequences of LENGTHS tokens."""
    kv_specs = [layer.of_rank(ranks.share) if isinstance(layer, Recurrent) else layer for layer in spec.kv_specs]
    kv_specs = [
        Paged(ranks.share(layer.num_kv_heads), layer.key_width, layer.value_width)
        if isinstance(layer, Paged)
        else layer
        for layer in kv_specs
    ]
    caches = Caches(kv_specs, CacheSizes(16, 16, 4, 0), torch.float32, torch.device(device))
    tables, slots, first = torch.zeros(len(LENGTHS), 5, dtype=torch.int64), [], 0
    for row, length in enumerate(LENGTHS):
        count = -(-length // 16)
        tables[row, :count] = torch.arange(first, first + count)
        slots.append(16 * first + torch.arange(length))
        first += count
    layout = PagedLayout(
        slot_mapping=torch.cat(slots).to(device),
        block_tables=tables.to(device),
        context_lengths=torch.tensor(LENGTHS).to(device),
        query_lengths=LENGTHS,
        host_context_lengths=LENGTHS,
        num_decodes=1,
        block_size=16,
        rows=torch.tensor([2, 0, 1]).to(device),
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(3, -1).to(device)
    backend = AttentionBackend()
    return ForwardContext(positions, layout, caches.layers, backend, backend.plan(layout, torch.float32))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_layers_of_all_ranks_add_up(
    name: str, size: int, network: Callable[[str], Any], network_folder: Callable[[str], Path]
) -> None:
    """Each mixer's result is the sum of those of the ranks, whatever heads are cut or copied."""
    whole = network(name)
    if whole.spec.text.delta_net.num_value_heads % size:
        with pytest.raises(StartupError, match="tensor-parallel-size"):
            load(network_folder(name), Silent(0, size))
        return
    parts = [load(network_folder(name), Silent(rank, size)) for rank in range(size)]
    hidden = whole.spec.text.hidden_size
    x = torch.randn(sum(LENGTHS), hidden, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros_like(x)
    contexts = [context(whole.spec, ranks) for ranks in (Ranks(), *(Silent(rank, size) for rank in range(size)))]
    for index, layer in enumerate(whole.language_model.layers):
        layers = [layer, *(part.language_model.layers[index] for part in parts)]
        angles = contexts[0].positions[0][:, None] * whole.language_model.frequencies
        rotation = cos_sin(angles, torch.float32)
        mixers = [getattr(one, layer.mixer_name) for one in layers]
        results = [mixer.add_to(nothing, x, rotation, its) for mixer, its in zip(mixers, contexts, strict=True)]
        torch.testing.assert_close(sum(results[1:]), results[0], atol=1e-5, rtol=1e-4)
        mixed = [one.mlp.add_to(nothing, x) for one in layers]
        torch.testing.assert_close(sum(mixed[1:]), mixed[0], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_step_never_looks_at_the_device(network_folder: Callable[[str], Path]) -> None:
    """A meta tensor has no content to look at: neither the delta rule nor its convolution waits for the device."""
    network = build(config_of(network_folder("qwen3_5")))
    network.finish()
    num_tokens = sum(LENGTHS)
    hidden = network(torch.zeros(num_tokens, dtype=torch.int64, device="meta"), context(network.spec, Ranks(), "meta"))
    assert (hidden.device.type, hidden.shape) == ("meta", (num_tokens, 104))


def test_decays_and_offset_norms_stay_float32(network_folder: Callable[[str], Path]) -> None:
    loaded = load(network_folder("qwen3_5"), dtype="bfloat16")
    stored = load_file(network_folder("qwen3_5") / "model.safetensors")
    prefix = "model.language_model.layers.0"
    layer = loaded.language_model.layers[0]
    assert torch.equal(layer.linear_attn.A_log, stored[f"{prefix}.linear_attn.A_log"])
    assert torch.equal(layer.linear_attn.dt_bias, stored[f"{prefix}.linear_attn.dt_bias"])
    assert layer.linear_attn.in_proj_qkv.weight.dtype == torch.bfloat16
    norm = layer.input_layernorm
    assert torch.equal(norm.scale, 1 + stored[f"{prefix}.input_layernorm.weight"].bfloat16().float())


def test_experts_may_be_stored_one_by_one(
    network: Callable[[str], Any], network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = tensors_for(network_folder("qwen3_5_moe"), tmp_path)
    split_experts(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    for one, other in zip(load(tmp_path).parameters(), network("qwen3_5_moe").parameters(), strict=True):
        assert torch.equal(one, other)


def test_fp8_blocks_end_where_segments_do_not(
    network_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values of a delta net are one matrix, whose blocks of 128 rows lie across their borders."""
    monkeypatch.setattr("saccade.engine.executor.unpacking.free_bytes", lambda: 0)
    (tmp_path / "whole").mkdir()
    tensors = tensors_for(network_folder("qwen3_5_moe"), tmp_path / "whole")
    split_experts(tensors)
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    kept = ("norm", "embed_tokens", "visual", "conv1d", "in_proj_a", "in_proj_b", "gate.weight", "lm_head")
    ignored = [
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith(".weight") and any(part in name for part in kept)
    ]
    folders = quantise(
        tmp_path / "whole", "fp8", lambda name: not any(part in name for part in kept), tmp_path, ignored
    )
    subjects = [engines.engine(folder) for folder in folders]
    first = engines.module(subjects[0]).language_model.layers[0]
    assert first.linear_attn.in_proj_qkv.weight.numel() == 0  # it is packed
    logits = [engines.record_logits(subject) for subject in subjects]
    for subject, folder in zip(subjects, folders, strict=True):
        engines.drain(subject, engines.request(folder, [40, ((96, 64), 1), 9]))
    torch.testing.assert_close(*(torch.stack(one["a"]) for one in logits), atol=1e-4, rtol=0)


def test_names(network: Callable[[str], Any]) -> None:
    locate = network("qwen3_5_moe").locate
    prefix, ours = "model.language_model.layers.2", "language_model.layers.2"
    assert locate("mtp.layers.0.self_attn.q_proj.weight") is None
    assert locate(f"{prefix}.linear_attn.in_proj_a.weight") == Target(f"{ours}.linear_attn.in_proj_ba.weight", 1)
    assert locate(f"{prefix}.linear_attn.in_proj_b.weight") == Target(f"{ours}.linear_attn.in_proj_ba.weight", 0)
    assert locate(f"{prefix}.linear_attn.in_proj_qkv.weight") == Target(f"{ours}.linear_attn.in_proj_qkv.weight")
    assert locate(f"{prefix}.mlp.experts.gate_up_proj") == Target(f"{ours}.mlp.experts.gate_up_proj")
    assert locate(f"{prefix}.mlp.experts.4.up_proj.weight") == Target(f"{ours}.mlp.experts.gate_up_proj", 1, 4)
    assert locate(f"{prefix}.mlp.shared_expert.up_proj.weight") == Target(
        f"{ours}.mlp.shared_expert.gate_up_proj.weight", 1
    )
    assert locate("lm_head.weight") == Target("lm_head.weight")
    drafting = partial(weights.hybrid_target, drafts=True)
    assert drafting("mtp.layers.0.self_attn.k_proj.weight") == Target("mtp.layers.0.self_attn.qkv_proj.weight", 1)
    assert drafting("mtp.layers.0.mlp.experts.3.down_proj.weight") == Target(
        "mtp.layers.0.mlp.experts.down_proj", None, 3
    )
    assert drafting("mtp.pre_fc_norm_hidden.weight") == Target("mtp.pre_fc_norm_hidden.weight")
    assert network("qwen3_5").locate("lm_head.weight") == Target("language_model.embed_tokens.weight")


@table("name", NAMES)
@table("suffix", ["linear_attn.A_log", "linear_attn.in_proj_b.weight", "linear_attn.conv1d.weight"])
def test_a_missing_or_misshaped_tensor_is_named(
    name: str, suffix: str, network_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = tensors_for(network_folder(name), tmp_path)
    key = f"model.language_model.layers.0.{suffix}"
    tensor = tensors.pop(key)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="lacks"):
        load(tmp_path)
    save_file({**tensors, key: tensor[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=key):
        load(tmp_path)


def test_keys_that_releases_leave_out(network_folder: Callable[[str], Path]) -> None:
    config = config_of(network_folder("qwen3_5"))
    text = config["text_config"]
    assert "deepstack_visual_indexes" not in config["vision_config"]  # [eng] 43
    expected = models.load_spec("qwen3_5", config)
    del text["rope_parameters"]["partial_rotary_factor"]
    assert models.load_spec("qwen3_5", config) == expected
    text["partial_rotary_factor"] = 0.5
    with pytest.raises(StartupError, match="mrope_section"):  # [eng] 45
        models.load_spec("qwen3_5", config)
    del text["partial_rotary_factor"], text["layer_types"]
    assert models.load_spec("qwen3_5", config).text.full_attention == {3}
    text["full_attention_interval"] = 2
    assert models.load_spec("qwen3_5", config).text.full_attention == {1, 3}


@table(
    ("path", "value", "words"),
    [
        ("text_config.rope_parameters.mrope_section", [3, 2, 2], "mrope_section"),  # [eng] 45
        ("text_config.rope_parameters.rope_type", "dynamic", "dynamic"),
        ("text_config.attn_output_gate", False, "attn_output_gate"),
        ("text_config.layer_types", ["full_attention"], "layer_types"),
        ("text_config.layer_types", ["linear_attention"] * 5, "layer_types"),
        ("text_config.layer_types", ["sliding_attention"] * 5, "layer_types"),
        ("text_config.linear_num_value_heads", 5, "linear_num_value_heads"),
        ("text_config.linear_conv_kernel_dim", 1, "linear_conv_kernel_dim"),
        ("text_config.linear_key_head_dim", None, "linear_key_head_dim"),
        ("text_config.intermediate_size", None, "intermediate_size"),
        ("vision_config.deepstack_visual_indexes", [1], "deepstack_visual_indexes"),
        ("vision_config.out_hidden_size", 40, "out_hidden_size"),
        ("image_token_id", None, "image_token_id"),  # A9
    ],
)
def test_wrong_config_names_the_key(
    path: str, value: object, words: str, network_folder: Callable[[str], Path]
) -> None:
    config = with_value(config_of(network_folder("qwen3_5")), path, value)
    with pytest.raises(StartupError, match=words):
        build(config)
