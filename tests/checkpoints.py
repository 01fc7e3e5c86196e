"""Tiny random checkpoints in hub layout, written the way the releases are: file names, tensor names, 4.x config.json.

Weights are random but not degenerate: matrices N(0, 1/fan_in), vectors with noise, so that a norm weight, a bias or an
axis of the positions that is forgotten shows in the logits.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torchvision_schemas import import_torchvision

CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is in this image? Describe the picture in detail. Compare the "
    "two images, please. What does it say? What colour is the text? def main(args): return sum(x ** 2 for x in y)\n"
    "You are a helpful assistant. user assistant system 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ !\"#$%&'()*+,-./:;<=>?@\n"
    "Héllo wörld, naïve café. 你好，世界！这张图片里有什么？ こんにちは 안녕하세요 \U0001f600\n"
)
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHAT_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in part -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))


def _added(content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, **flags, "special": content in SPECIAL}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.json; return the ids of the added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    base = tokenizer.get_vocab_size()
    ids = {content: base + index for index, content in enumerate((*SPECIAL, *NOT_SPECIAL))}
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [{"id": number, **_added(content)} for content, number in ids.items()]
    _write(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): _added(content) for content, number in ids.items()},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 32768,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    _write(folder, "tokenizer_config.json", settings)
    _write(folder, "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    return ids


def _randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.1)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))


def _config(ids: dict[str, int], vocab_size: int) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "rope_theta": 5e6,
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
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write_qwen3_vl(folder: Path) -> Path:
    """Write a tiny random Qwen3-VL into *folder* and return it: 4 layers, hidden 128, float32, 5 MB."""
    import_torchvision()
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder)
    vocab_size = -(-(max(ids.values()) + 1) // 64) * 64
    config = _config(ids, vocab_size)
    _write(folder, "config.json", config)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    _write(folder, "generation_config.json", {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]})
    processor = {
        "size": {"shortest_edge": 4096, "longest_edge": 1048576}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    _write(folder, "preprocessor_config.json", processor)
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(folder)).float().eval()
    _randomize(model)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
