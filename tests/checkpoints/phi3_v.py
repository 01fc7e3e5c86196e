"""Phi-3-vision, as a gateway sees it: a template for strings only, and special tokens that swallow space after them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import templates
from checkpoints.qwen import CLIP
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, write_json, write_llama_like

TOKENS = (
    "<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|placeholder2|>", "<|placeholder3|>", "<|placeholder4|>",
    "<|system|>", "<|end|>", "<|placeholder5|>", "<|placeholder6|>", "<|user|>", "<|placeholder7|>", "<|image|>",
)  # fmt: skip
SWALLOWING = ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
NUM_CROPS = 16
NETWORK: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16384, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "sliding_window": 262144,
    "tie_word_embeddings": False, "torch_dtype": "float32", "attention_dropout": 0.0, "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "rope_scaling": {
        "type": "su", "short_factor": [1 + pair / 20 for pair in range(12)],
        "long_factor": [1 + pair / 2 for pair in range(12)],
    },
    "vision_config": {
        "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 5, "num_attention_heads": 2,
        "layer_norm_eps": 1e-5,
    },
}  # fmt: skip
"""What a tiny network has in config.json, in addition to what a gateway reads."""


def write(folder: Path) -> Path:
    """Write the gateway's files into *folder* and return it."""
    settings = {
        "chat_template": templates.PHI3_V, "pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "legacy": False,
        "processor_class": "Phi3VProcessor", "padding_side": "right", "model_max_length": 131072,
    }  # fmt: skip
    ids = write_llama_like(folder, [added(token, rstrip=token in SWALLOWING) for token in TOKENS], settings)
    config = {
        "architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "vocab_size": 960, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": ids["<|endoftext|>"],
        "auto_map": {"AutoConfig": "configuration_phi3_v.Phi3VConfig"},
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
            "use_hd_transform": True, "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 64, "model_name": "openai/clip-vit-large-patch14-336", "name": "clip_vision_model",
            "num_img_tokens": 144, "layer_idx": -2, "type_feature": "patch",
        },
    }  # fmt: skip
    write_json(folder, "config.json", config)
    ends = {"bos_token_id": 1, "eos_token_id": [2, ids["<|end|>"], ids["<|endoftext|>"]]}
    write_json(folder, "generation_config.json", {**ends, "pad_token_id": ids["<|endoftext|>"]})
    processor = {
        "auto_map": {
            "AutoProcessor": "processing_phi3_v.Phi3VProcessor",
            "AutoImageProcessor": "image_processing_phi3_v.Phi3VImageProcessor",
        },
        "image_processor_type": "Phi3VImageProcessor", "num_crops": NUM_CROPS, "num_img_tokens": 144,
        "processor_class": "Phi3VProcessor", **CLIP,
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", processor)
    return folder


def write_network(folder: Path) -> Path:
    """Write the whole checkpoint, tiny and random, with weights in float32, into *folder* and return it.

    It serves images of at most two crops, and describes its vision tower, which the releases only name.
    """
    from references.phi3_v_network import Phi3V

    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    write_json(folder, "preprocessor_config.json", {**settings, "num_crops": 2})
    config = json.loads((folder / "config.json").read_text())
    config |= {**NETWORK, "img_processor": {**config["img_processor"], "image_dim_out": 40}}
    write_json(folder, "config.json", config)
    model = Phi3V(config)
    randomize(model)
    with torch.no_grad():
        for learned in (model.newline, model.separator):
            learned.normal_(generator=torch.Generator().manual_seed(learned.ndim))
    tensors = {name: value.contiguous() for name, value in model.released().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
