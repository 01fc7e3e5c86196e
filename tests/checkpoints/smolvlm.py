"""SmolVLM (Idefics3's architecture) and SmolVLM2: as a gateway sees them, and whole tiny ones with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from checkpoints import templates
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, byte_level, write_json

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ARCHITECTURES = {"smolvlm": "Idefics3ForConditionalGeneration", "smolvlm2": "SmolVLMForConditionalGeneration"}
MODEL_TYPES = {"smolvlm": "idefics3", "smolvlm2": "smolvlm"}
PROCESSORS = {"smolvlm": "Idefics3", "smolvlm2": "SmolVLM"}
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>",
    "<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 112,
    "patch_size": 14, "max_image_size": {"longest_edge": 112}, "size": {"longest_edge": 448}, "use_base_siglip": True,
}  # fmt: skip
TINY_VISION = {
    **VISION, "hidden_size": 48, "intermediate_size": 80, "image_size": 64, "patch_size": 16,
    "max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 256},
}  # fmt: skip
TEXT = {
    "hidden_size": 96, "intermediate_size": 168, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24,
}  # fmt: skip


def _tokenizer(folder: Path) -> dict[str, int]:
    """Write GPT-2's kind of tokenizer, with digits one by one; return the ids of the added tokens."""
    tokenizer = byte_level(GPT2_PATTERN, vocab_size=1200, nfc=False, over_borders=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    numbered = dict(enumerate(map(added, SPECIAL), start=tokenizer.get_vocab_size()))
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [{"id": number, **entry} for number, entry in numbered.items()]
    write_json(folder, "tokenizer.json", parsed)
    settings = {
        "added_tokens_decoder": {str(number): entry for number, entry in numbered.items()},
        "add_prefix_space": False, "bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>",
        "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
        "model_max_length": 8192, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    write_json(folder, "tokenizer_config.json", settings)
    return {entry["content"]: number for number, entry in numbered.items()}


def write(folder: Path, name: str, vision: Mapping[str, Any] = VISION, scale: int = 4) -> Path:
    """Write the gateway's files of the release *name* into *folder* and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    text = {
        "architectures": ["VLlama3ForCausalLM"], "model_type": "llama", "vocab_size": 1280, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "pad_token_id": ids["<|im_end|>"], "qk_layer_norms": False, **TEXT,
    }  # fmt: skip
    config = {
        "architectures": [ARCHITECTURES[name]], "model_type": MODEL_TYPES[name], "image_token_id": ids["<image>"],
        "scale_factor": scale, "text_config": text, "vision_config": {**vision, "model_type": f"{MODEL_TYPES[name]}_vision"},
        "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True, "vocab_size": 1280,
    }  # fmt: skip
    write_json(folder, "config.json", config)
    processor = f"{PROCESSORS[name]}Processor"
    sizes = {
        "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
        "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1, "rescale_factor": 1 / 255,
        "image_processor_type": f"{PROCESSORS[name]}ImageProcessor", "max_image_size": vision["max_image_size"],
        "processor_class": processor, "size": vision["size"],
    }  # fmt: skip
    write_json(folder, "preprocessor_config.json", sizes)
    count = (vision["image_size"] // vision["patch_size"] // scale) ** 2
    write_json(folder, "processor_config.json", {"image_seq_len": count, "processor_class": processor})
    write_json(folder, "chat_template.json", {"chat_template": templates.SMOLVLM})
    ends = {"bos_token_id": 1, "eos_token_id": ids["<end_of_utterance>"], "pad_token_id": ids["<|im_end|>"]}
    write_json(folder, "generation_config.json", ends)
    return folder


def write_network(folder: Path, name: str) -> Path:
    """Write a whole tiny one: 4 layers, hidden 96, views of 4 x 4 patches and 4 tokens."""
    write(folder, name, TINY_VISION, scale=2)
    import transformers

    kind = f"{PROCESSORS[name]}Config"
    config = getattr(transformers, kind).from_pretrained(folder)
    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES[name])(config).float().eval()
    randomize(model)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
