"""The decoder of Llama, Mistral and Phi-3 against transformers."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints.qwen3_vl import randomize
from safetensors.torch import save_file
from tables import table
from weights import fill_from

from saccade.errors import StartupError
from saccade.models.backbones.grouped_query_text import GroupedQueryDecoder
from saccade.models.backbones.names import target_of
from saccade.models.backbones.text_config import PHI3, TextConfig
from saccade.models.backbones.text_network import TextNetwork
from saccade.models.network import Target
from saccade.nn.backends.torch_sdpa import AttentionBackend
from saccade.nn.context import ForwardContext, KvCache, PagedLayout

BLOCK, NUM_TOKENS = 8, 45
BASE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 60, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-3,
}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 5.0, 7.0]}
SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "rope_theta": 500.0}),
    "llama, own head size": ("Llama", {"head_dim": 8}),
    "llama, every head its own keys": ("Llama", {"num_key_value_heads": None}),
    "llama, linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mistral, window": ("Mistral", {"sliding_window": 11}),
    "mistral, window as long as the context": ("Mistral", {"sliding_window": 96}),
    "phi3, long": ("Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3, short, window": (
        "Phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64, "sliding_window": 13},
    ),
}
MAX_MODEL_LEN = 48
"""Beyond the shorter of the original lengths above, but not the longer."""


def reference(kind: str, config: dict[str, Any]) -> Any:
    import transformers

    extra = {"pad_token_id": None} if kind == "Phi3" else {}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config, **extra))
    randomize(model)
    return model.eval()


class Network(TextNetwork):
    """A decoder and a head."""

    decoder = GroupedQueryDecoder

    def target(self, name: str) -> Target:
        return target_of(name, PREFIXES)


PREFIXES = [("model.", "language_model.")]


def load(config: TextConfig, model: Any, folder: Path) -> TextNetwork:
    network = Network(SimpleNamespace(text=config), {}, {})
    save_file(
        {name: value.contiguous().clone() for name, value in model.state_dict().items()}, folder / "all.safetensors"
    )
    fill_from(network, folder / "all.safetensors")
    network.finish()
    return network


def context(start: int, stop: int, caches: list[KvCache]) -> ForwardContext:
    """Tokens [start, stop) of the only sequence."""
    layout = PagedLayout(
        slot_mapping=torch.arange(start, stop),
        block_tables=torch.arange(-(-stop // BLOCK)).unsqueeze(0),
        context_lengths=torch.tensor([stop]),
        query_lengths=(stop - start,),
        host_context_lengths=(stop,),
        num_decodes=int(stop - start == 1),
        block_size=BLOCK,
        rows=torch.zeros(1, dtype=torch.int64),
    )
    backend = AttentionBackend()
    # Only the first axis counts.
    positions = torch.stack((torch.arange(start, stop), torch.zeros(stop - start), torch.zeros(stop - start))).long()
    return ForwardContext(positions, layout, caches, backend, backend.plan(layout, torch.float32))


@table("name", SUBJECTS)
@torch.inference_mode()
def test_logits_equal_the_reference(name: str, tmp_path: Path) -> None:
    kind, changes = SUBJECTS[name]
    given = {**BASE, **changes}
    model = reference(kind, given)
    config = TextConfig.read_decoder(given, PHI3, max_model_len=MAX_MODEL_LEN)
    network = load(config, model, tmp_path)
    caches = [
        KvCache(*(torch.full((8, BLOCK, spec.num_kv_heads, spec.key_width), float("nan")) for _ in range(2)))
        for spec in config.kv_specs
    ]
    ids = torch.randint(BASE["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    steps = [0, 20, 43, 44, NUM_TOKENS]  # a fresh chunk, one behind it, and two single tokens
    rows = [
        network.logits(network(ids[start:stop], context(start, stop, caches)))
        for start, stop in itertools.pairwise(steps)
    ]
    torch.testing.assert_close(torch.cat(rows), model(ids.unsqueeze(0)).logits[0], atol=1e-4, rtol=0)


def test_fused_and_separate_names() -> None:
    names = ("model.layers.2.self_attn.k_proj.weight", "model.layers.2.self_attn.qkv_proj.weight", "lm_head.weight")
    assert [target_of(name, [("model.", "text.")])[:2] for name in names] == [
        ("text.layers.2.self_attn.qkv_proj.weight", 1),
        ("text.layers.2.self_attn.qkv_proj.weight", None),
        ("lm_head.weight", None),
    ]


def test_defaults_stand_for_missing_keys_alone() -> None:
    silent = {key: value for key, value in BASE.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
    defaults = {"rms_norm_eps": 1e-6, "num_key_value_heads": 3, "sliding_window": 20}
    style = PHI3._replace(defaults={**PHI3.defaults, **defaults})
    config = TextConfig.read_decoder({**silent, "sliding_window": None}, style)
    assert (config.norm_eps, config.num_kv_heads, config.sliding_window) == (1e-6, 3, None)
    assert TextConfig.read_decoder(silent, style).sliding_window == 20


@table(
    ("changes", "words"),
    [
        ({"hidden_size": "60"}, "hidden_size"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "even number"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_wrong_config_names_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        TextConfig.read_decoder({**BASE, **changes}, PHI3)
