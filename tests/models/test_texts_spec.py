"""The configurations of models that read text only: defaults, wrong keys, and the sizes of releases."""

from typing import Any

import networks
import pytest
import torch
import transformers
from checkpoints import texts
from tables import table

from saccade import models
from saccade.errors import StartupError, UnsupportedParameter
from saccade.models.backbones.layer_types import FULL, SLIDING
from saccade.models.family import ImageOptions

LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_HALF = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_0_6B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "attention_bias": False,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B = {
    **QWEN3_0_6B, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3_1B = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 512,
    "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000,
}  # fmt: skip
QWEN3_5_4B = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "full_attention_interval": 4, "tie_word_embeddings": True,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN3_5_35B = {
    **QWEN3_5_4B, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
RELEASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("LlamaForCausalLM", LLAMA_1B),
    "Mistral-7B-Instruct-v0.3": ("MistralForCausalLM", MISTRAL_7B),
    "Qwen2.5-0.5B": ("Qwen2ForCausalLM", QWEN2_HALF),
    "Qwen3-0.6B": ("Qwen3ForCausalLM", QWEN3_0_6B),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", QWEN3_30B),
    "Qwen3.5-4B": ("Qwen3_5ForCausalLM", QWEN3_5_4B),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeForCausalLM", QWEN3_5_35B),
    "gemma-3-1b-it": ("Gemma3ForCausalLM", GEMMA3_1B),
}


def spec_of(architecture: str, config: dict[str, Any]) -> Any:
    whole = {"architectures": [architecture], **config}
    return models.load_spec(models.family_of(whole), whole)


@table("name", RELEASES)
def test_releases_have_the_parameters_that_transformers_counts(name: str) -> None:
    architecture, config = RELEASES[name]
    network = networks.build({"architectures": [architecture], **config})
    made = transformers.CONFIG_MAPPING[config["model_type"]](**config)
    with torch.device("meta"):
        reference = getattr(transformers, architecture)(made)
    assert sum(one.numel() for one in network.parameters()) == sum(one.numel() for one in reference.parameters())
    assert not network.spec.takes_media
    assert network.spec.max_position_embeddings == config["max_position_embeddings"]


@table("name", texts.CONFIGS)
def test_keys_that_are_left_out_have_the_defaults_of_the_class(name: str) -> None:
    architecture, own = texts.CONFIGS[name]
    kind = own["model_type"]
    made = transformers.CONFIG_MAPPING[kind]()
    defaults = made.to_dict() | (made.rope_parameters or {})
    silent = spec_of(architecture, {"model_type": kind})
    assert silent.text.tied == made.tie_word_embeddings
    table_of_style = silent.text.style.defaults
    # Ministral 3's section of rotary positions is compared with the other tests of its decoder.
    apart = {"rope_theta", "rope_parameters"} if "rope_parameters" in table_of_style else set()
    compared = (table_of_style.keys() & defaults.keys()) - apart
    wrong = {key: defaults[key] for key in compared if defaults[key] != table_of_style[key]}
    assert wrong == {}


@table(
    ("architecture", "changes", "words"),
    [
        ("LlamaForCausalLM", {"model_type": "gpt2"}, "model_type"),
        ("LlamaForCausalLM", {"hidden_size": "60"}, "hidden_size"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        ("MistralForCausalLM", {"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ("Qwen2ForCausalLM", {"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ("Qwen3ForCausalLM", {"model_type": "qwen3", "num_key_value_heads": 3}, "num_key_value_heads"),
        ("Gemma3ForCausalLM", {"model_type": "gemma3_text", "sliding_window": None}, "sliding_window"),
        *(
            (architecture, {"model_type": kind, "num_hidden_layers": 2, "layer_types": types}, "layer_types")
            for architecture, kind, types in (
                ("LlamaForCausalLM", "llama", [SLIDING] * 2),
                ("Qwen2ForCausalLM", "qwen2", [SLIDING, FULL]),
                ("MistralForCausalLM", "mistral", [SLIDING, FULL]),
            )
        ),
    ],
)
def test_wrong_config_names_the_key(architecture: str, changes: dict[str, Any], words: str) -> None:  # A1
    with pytest.raises(StartupError, match=words):
        spec_of(architecture, {"model_type": "llama", **changes})


def test_the_window_of_llama_does_not_count() -> None:
    """Its class in transformers has none; that of Mistral has."""
    own = {"sliding_window": 20, "num_hidden_layers": 2}
    assert spec_of("LlamaForCausalLM", {"model_type": "llama", **own}).text.sliding_window is None
    windowed = {"model_type": "mistral", **own, "layer_types": [SLIDING] * 2}
    assert spec_of("MistralForCausalLM", windowed).text.sliding_window == 20
    full = {"model_type": "qwen3", **own, "layer_types": [FULL] * 2}
    assert spec_of("Qwen3ForCausalLM", full).text.sliding_window is None


def test_yarn_of_a_readme_makes_the_sequence_longer() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_of("Qwen3ForCausalLM", {**QWEN3_0_6B, "rope_scaling": yarn}).max_position_embeddings == 131072


def test_layout_refuses_every_image() -> None:
    layout = models.load_layout("qwen3_text")({}, {})
    with pytest.raises(UnsupportedParameter, match="reads text only"):
        layout.settings_for(ImageOptions())
    with pytest.raises(UnsupportedParameter, match="reads text only"):
        layout.image(64, 64, {})
