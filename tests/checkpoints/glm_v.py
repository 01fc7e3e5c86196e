"""GLM-4.xV, dense and with experts, and GLM-OCR: as a gateway sees them, and whole tiny ones with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torchvision_schemas import import_torchvision

from checkpoints import templates
from checkpoints.experts import one_by_one
from checkpoints.qwen import CLIP
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, byte_level, write_json

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>",
    "<|video|>", "<|begin_of_box|>", "<|end_of_box|>",
)  # fmt: skip
NOT_SPECIAL = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
)  # fmt: skip
ARCHITECTURES = {
    "glm4v": "Glm4vForConditionalGeneration", "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration", "glm_ocr": "GlmOcrForConditionalGeneration",
}  # fmt: skip
PROCESSORS = {"glm4v": "Glm4v", "glm4v_moe": "Glm4v", "glm46v": "Glm46V", "glm_ocr": "Glm46V"}
VISION = {
    "depth": 3, "hidden_size": 48, "num_heads": 4, "in_channels": 3, "image_size": 98, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 96, "intermediate_size": 72,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False,
}  # fmt: skip
TEXT = {
    "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 136, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def _rope(factor: float, section: list[int]) -> dict[str, Any]:
    rope = {"rope_scaling": {"rope_type": "default", "mrope_section": section}, "rope_theta": 10000.0}
    return {**rope, "partial_rotary_factor": factor}


DENSE = {**TEXT, "model_type": "glm4v_text", **_rope(0.5, [1, 3, 2])}
EXPERTS = {
    **TEXT, **_rope(0.5, [2, 1, 3]), "model_type": "glm4v_moe_text", "head_dim": 24, "num_attention_heads": 6,
    "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.7,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm4v": (DENSE, VISION),
    "glm4v_moe": (EXPERTS, {**VISION, "attention_bias": True}),
    "glm46v": ({**DENSE, **_rope(0.5, [2, 2, 2])}, {**VISION, "num_heads": 2, "image_size": 56}),
    "glm_ocr": (
        {**TEXT, "model_type": "glm_ocr_text", "head_dim": 32, **_rope(1.0, [4, 7, 5])},
        {**VISION, "attention_bias": True, "intermediate_size": 80},
    ),
}
"""Text and vision of each release."""


def _tokenizer(folder: Path, vocab_size: int, over_borders: bool) -> dict[str, int]:
    tokenizer = byte_level(PATTERN, vocab_size=vocab_size, nfc=False, over_borders=over_borders)
    tokens = [added(name) for name in SPECIAL] + [added(name, special=False) for name in NOT_SPECIAL]
    numbered = dict(enumerate(tokens, start=tokenizer.get_vocab_size()))
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
        "model_max_length": 65536, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path, name: str, vocab_size: int = 1200, most_pixels: int = 28 * 28 * 15000) -> Path:
    """Write the gateway's files of the release *name* into *folder* and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder, vocab_size, over_borders=vocab_size > 1000)
    text, vision = CONFIGS[name]
    ends = [ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    size = -(-(max(ids.values()) + 1) // 64) * 64
    config = {
        "architectures": [ARCHITECTURES[name]], "model_type": name, "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"], "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"], "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"], "torch_dtype": "float32", "tie_word_embeddings": False,
        "text_config": {**text, "vocab_size": size, "eos_token_id": ends, "pad_token_id": ends[0]},
        "vision_config": {**vision, "model_type": "glm_ocr_vision" if name == "glm_ocr" else f"{name}_vision"},
    }  # fmt: skip
    if name == "glm46v":
        config["vision_config"]["model_type"] = "glm4v_vision"
    write_json(folder, "config.json", config)
    kind = PROCESSORS[name]
    processor = {
        "do_rescale": True, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **CLIP,
        "size": {"shortest_edge": 112 * 112, "longest_edge": most_pixels}, "processor_class": f"{kind}Processor",
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", {**processor, "image_processor_type": f"{kind}ImageProcessor"})
    video = {**processor, "video_processor_type": f"{kind}VideoProcessor", "num_frames": 16, "fps": 2}
    write_json(folder, "video_preprocessor_config.json", video)
    (folder / "chat_template.jinja").write_text(templates.GLM_V)
    write_json(folder, "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[0], "do_sample": False})
    return folder


def write_network(folder: Path, name: str) -> Path:
    """Write a whole tiny one: 4 layers, hidden 96, and a draft layer that nobody loads."""
    import_torchvision()
    import transformers

    write(folder, name, vocab_size=600, most_pixels=1 << 21)
    model_class = getattr(transformers, ARCHITECTURES[name])
    torch.manual_seed(0)
    model = model_class(model_class.config_class.from_pretrained(folder)).float().eval()
    randomize(model)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    stored = (one for key, tensor in model.state_dict().items() for one in one_by_one(key, tensor))
    tensors: Mapping[str, torch.Tensor] = {key: tensor.clone() for key, tensor in stored}
    draft = {"model.language_model.layers.4.eh_proj.weight": torch.zeros(3, 5)}
    save_file({**tensors, **draft}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
