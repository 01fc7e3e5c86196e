"""The names, shapes and dtypes of a release's 208,550 tensors against the network of the release's sizes; no values."""

from collections.abc import Iterator

import pytest
import torch

from saccade import models
from saccade.engine.executor.quantisation import ModuleList, Quantisation
from saccade.engine.executor.weight_files import StoredTensor
from saccade.engine.executor.weight_plan import make_plan
from saccade.nn.formats.packed_ints import compressed
from saccade.nn.parallel import ALONE, Ranks

TEXT = {
    "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False, "vocab_size": 163840, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
VISION = {
    "init_pos_emb_height": 64, "init_pos_emb_time": 4, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_hidden_size": 1152, "mm_projector_type": "patchmerger", "patch_size": 14,
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168, "video_attn_type": "spatial_temporal", "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304, "vt_num_attention_heads": 16, "vt_num_hidden_layers": 27,
}  # fmt: skip
CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"], "media_placeholder_token_id": 163605,
    "text_config": TEXT, "vision_config": VISION, "tie_word_embeddings": False,
}  # fmt: skip
PROCESSOR = {
    "media_proc_cfg": {
        "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    }
}  # fmt: skip
IGNORED = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")
ATTENTION = {
    "kv_a_layernorm": (512,), "kv_a_proj_with_mqa": (576, 7168), "kv_b_proj": (16384, 512), "o_proj": (7168, 8192),
    "q_a_layernorm": (1536,), "q_a_proj": (1536, 7168), "q_b_proj": (12288, 1536),
}  # fmt: skip
BLOCK = {
    "mlp.fc0": (4304, 1152), "mlp.fc1": (1152, 4304), "norm0": (1152,), "norm1": (1152,), "wo": (1152, 1152),
    "wqkv": (3456, 1152),
}  # fmt: skip

Header = tuple[str, tuple[int, ...], str]


def mlp(width: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, 7168), "up_proj": (width, 7168), "down_proj": (7168, width)}


def headers() -> Iterator[Header]:
    """The release's tensors."""
    text, tower = "language_model.model.", "vision_tower."
    for name in ("language_model.lm_head", f"{text}embed_tokens"):
        yield f"{name}.weight", (163840, 7168), "BF16"
    yield f"{text}norm.weight", (7168,), "BF16"
    for layer in range(61):
        yield from text_layer(f"{text}layers.{layer}.", layer)
    for number in range(27):
        for name, shape in BLOCK.items():
            yield f"{tower}encoder.blocks.{number}.{name}.weight", shape, "BF16"
            yield f"{tower}encoder.blocks.{number}.{name}.bias", shape[:1], "BF16"
    others = {
        f"{tower}encoder.final_layernorm": (1152,), f"{tower}patch_embed.proj": (1152, 3, 14, 14),
        "mm_projector.pre_norm": (1152,), "mm_projector.proj.0": (4608, 4608), "mm_projector.proj.2": (7168, 4608),
    }  # fmt: skip
    for name, shape in others.items():
        yield f"{name}.weight", shape, "BF16"
        yield f"{name}.bias", shape[:1], "BF16"
    yield f"{tower}patch_embed.pos_emb.weight", (64, 64, 1152), "BF16"


def text_layer(prefix: str, layer: int) -> Iterator[Header]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", (7168,), "BF16"
    for name, shape in ATTENTION.items():
        yield f"{prefix}self_attn.{name}.weight", shape, "BF16"
    dense = {"mlp": 18432} if layer == 0 else {"mlp.shared_experts": 2048}
    for name, width in dense.items():
        yield from ((f"{prefix}{name}.{matrix}.weight", shape, "BF16") for matrix, shape in mlp(width).items())
    if layer == 0:
        return
    yield f"{prefix}mlp.gate.weight", (384, 7168), "BF16"
    yield f"{prefix}mlp.gate.e_score_correction_bias", (384,), "F32"
    for expert in range(384):
        for matrix, (rows, columns) in mlp(2048).items():
            name = f"{prefix}mlp.experts.{expert}.{matrix}."
            yield f"{name}weight_packed", (rows, columns // 8), "I32"
            yield f"{name}weight_scale", (rows, columns // 32), "BF16"
            yield f"{name}weight_shape", (2,), "I32"


class Headers:
    """A checkpoint of which the headers are known, and the values that follow from them."""

    def __init__(self) -> None:
        self.tensors = {name: StoredTensor(name, "a", shape, dtype) for name, shape, dtype in headers()}

    def read(self, name: str) -> torch.Tensor:
        """A tensor `weight_shape`."""
        rows, columns = self.tensors[name.replace("shape", "packed")].shape
        return torch.tensor([rows, 8 * columns])


@pytest.mark.conformance
@pytest.mark.parametrize("ranks", [ALONE, Ranks(7, 8)], ids=str)
def test_kimi_k25(ranks: Ranks) -> None:
    checkpoint = Headers()
    assert len(checkpoint.tensors) == 208_550
    spec = models.load_spec("kimi_k25", CONFIG)
    with torch.device("meta"):
        network = models.load_network("kimi_k25")(spec, CONFIG, PROCESSOR, ranks)
    network.to(torch.bfloat16)
    quantisation = Quantisation(compressed(4, 32), ModuleList.of(IGNORED), "config.json")
    plan = make_plan(network, checkpoint, quantisation, ranks)  # type: ignore[arg-type]
    # The release's own figure, but for its tensors of shapes. A rank reads a part of each tensor that is cut.
    assert round(plan.num_bytes / 2**30, 2) == 554.27
    quantised = {name for name in plan.places if plan.is_quantised(name)}
    assert {name.rpartition(".")[2] for name in quantised} == {"gate_up_proj", "down_proj"}
    assert len(quantised) == 2 * 60
