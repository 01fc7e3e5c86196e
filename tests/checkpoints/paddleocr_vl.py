"""PaddleOCR-VL: as a gateway sees it, and a whole tiny one with random weights and the release's names of tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torchvision_schemas import import_torchvision

from checkpoints import templates
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, byte_fallback, write_json

UNKNOWN, BEGIN, END, CLASS = "<unk>", "<s>", "</s>", "<|begin_of_sentence|>"
SPECIAL = (CLASS, "<|end_of_sentence|>", "<|IMAGE_PLACEHOLDER|>", "<|video_pad|>", "<|IMAGE_START|>", "<|IMAGE_END|>")
PROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "image_processor_type": "PaddleOCRVLImageProcessor", "min_pixels": 112896,
    "max_pixels": 1003520, "merge_size": 2, "patch_size": 14, "processor_class": "PaddleOCRVLProcessor", "resample": 3,
    "rescale_factor": 1 / 255, "size": {"min_pixels": 112896, "max_pixels": 1003520}, "temporal_patch_size": 1,
}  # fmt: skip
TEXT = {
    "hidden_size": 104, "intermediate_size": 168, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
VISION = {
    "model_type": "paddleocr_vl", "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_channels": 3, "image_size": 76, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
}  # fmt: skip


def _tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer like ERNIE's, which adds no token and no space; return the ids of the added tokens."""
    parsed = byte_fallback()
    entries = [added(UNKNOWN), added(BEGIN), added(END)]
    numbered = dict(enumerate(entries)) | dict(enumerate(map(added, SPECIAL), start=len(parsed["model"]["vocab"])))
    parsed |= {
        "added_tokens": [{"id": number, **entry} for number, entry in numbered.items()],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "post_processor": None,
    }
    parsed["decoder"]["decoders"] = parsed["decoder"]["decoders"][:-1]
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN, "cls_token": CLASS, "pad_token": UNKNOWN,
        "add_bos_token": False, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {"image_token": "<|IMAGE_PLACEHOLDER|>"}, "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return {entry["content"]: number for number, entry in numbered.items()}


def _config(ids: Mapping[str, int]) -> dict[str, Any]:
    """The flat config.json of the releases."""
    return {
        "architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl",
        "vocab_size": -(-(max(ids.values()) + 1) // 64) * 64, "hidden_act": "silu", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000, "rope_is_neox_style": True, "use_bias": False, "head_dim": 32,
        "rope_scaling": {"mrope_section": [4, 5, 7], "rope_type": "default", "type": "default"},
        "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|IMAGE_START|>"], "vision_end_token_id": ids["<|IMAGE_END|>"],
        "bos_token_id": ids[BEGIN], "eos_token_id": ids[END], "pad_token_id": 0, "tie_word_embeddings": False,
        "torch_dtype": "float32", "use_cache": True, "vision_config": VISION, **TEXT,
    }  # fmt: skip


def write(folder: Path, processor: Mapping[str, Any] = PROCESSOR) -> Path:
    """Write the gateway's files into *folder* and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    write_json(folder, "config.json", _config(ids))
    write_json(folder, "preprocessor_config.json", processor)
    (folder / "chat_template.jinja").write_text(templates.PADDLEOCR_VL)
    write_json(folder, "generation_config.json", {"eos_token_id": ids[END], "pad_token_id": 0})
    return folder


def _released(name: str) -> str:
    """Return the release's name of a tensor of transformers."""
    for ours, theirs in (
        ("model.visual.", "visual."), ("model.projector.", "mlp_AR."), ("model.language_model.", "model.")
    ):  # fmt: skip
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def write_network(folder: Path) -> Path:
    """Write a whole tiny one: 4 layers, hidden 104, a table of 5 x 5 positions, and tensors that nobody loads."""
    import_torchvision()
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    limits = {"min_pixels": 3136, "max_pixels": 1 << 20}
    write(folder, {**PROCESSOR, **limits, "size": limits})
    torch.manual_seed(0)
    model = PaddleOCRVLForConditionalGeneration(PaddleOCRVLConfig.from_pretrained(folder)).float().eval()
    randomize(model)
    # transformers ties the head of a flat config.json whatever that says; the releases store both tensors.
    tensors = {_released(name): value.clone() for name, value in model.state_dict().items()}
    tower = "visual.vision_model."
    tensors |= {
        f"{tower}head.probe": torch.zeros(1),
        f"{tower}embeddings.packing_position_embedding.weight": torch.ones(1),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
