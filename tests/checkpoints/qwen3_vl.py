"""A whole Qwen3-VL with random weights that are not degenerate.

Matrices are N(0, 1/fan_in), vectors have noise, so that a norm weight, a bias or an axis of the positions that is
forgotten shows in the logits.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torchvision_schemas import import_torchvision

from checkpoints import qwen
from checkpoints.vocabulary import byte_level, write_json


def randomize(model: torch.nn.Module) -> None:
    """Draw the weights of *model*. Experts are [experts, outputs, inputs].

    An embedding that makes logits too is small: with large ones greedy decoding repeats one token.
    """
    generator = torch.Generator().manual_seed(0)
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    embedding_scale = 0.1 if is_tied else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.1)
            elif "embed_tokens" in name:
                parameter.copy_(noise * embedding_scale)
            else:
                fan_in = parameter.shape[-1] if parameter.ndim == 3 else parameter[0].numel()
                parameter.copy_(noise / math.sqrt(fan_in))


def _config(ids: dict[str, int]) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": qwen.vocab_size(ids), "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
        "out_hidden_size": 128, "num_position_embeddings": 64, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [0, 1, 2],
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        **qwen.image_ids(ids),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write_qwen3_vl(folder: Path) -> Path:
    """Write a tiny random Qwen3-VL into *folder* and return it: 4 layers, hidden 128, float32, 5 MB."""
    import_torchvision()
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = qwen.write_tokenizer(folder, qwen.RELEASES["qwen3_vl"], byte_level(qwen.QWEN2_PATTERN))
    write_json(folder, "config.json", _config(ids))
    qwen.write_generation_config(folder, ids)
    size = {"shortest_edge": 4096, "longest_edge": 1048576}
    write_json(folder, "preprocessor_config.json", {**qwen.QWEN3_PROCESSOR, "size": size})
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(folder)).float().eval()
    randomize(model)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
