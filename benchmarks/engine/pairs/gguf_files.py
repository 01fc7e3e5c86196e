"""A Qwen3-VL in hub layout as llama.cpp's files: `python -m benchmarks.engine.pairs.gguf_files MODEL OUT`.

Writes text-q4_0.gguf and mmproj-q8_0.gguf, for timing only: the template is a short one, and few special tokens are
named. Needs the package gguf, which Saccade does not install. Names of keys and tensors are those of llama.cpp's
convert_hf_to_gguf.py.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""GGUF's kinds of tokens."""

TEXT_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
BLOCK_NAMES = {
    "norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
}  # fmt: skip
MERGER_NAMES = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
DEEPSTACK_NAMES = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


def tensors(folder: Path, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors below model.*part*, by the rest of their names."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.startswith(f"model.{part}."):
                yield name.removeprefix(f"model.{part}."), file.get_tensor(name)


def add(writer: Any, name: str, tensor: torch.Tensor, kind: Any) -> None:
    """Add a matrix in the number format *kind*, anything else in float32."""
    if tensor.ndim < 2 or kind is None:
        writer.add_tensor(name, tensor.float().numpy())
    else:
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)


def add_tokenizer(writer: Any, folder: Path, num_words: int) -> None:
    """Add the vocabulary, padded to *num_words*, and the template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {one["id"]: one for one in tokenizer["added_tokens"]}
    words = {index: word for word, index in tokenizer["model"]["vocab"].items()}
    tokens, kinds = [], []
    for index in range(num_words):
        if index in added:
            tokens.append(added[index]["content"])
            kinds.append(CONTROL if added[index]["special"] else USER_DEFINED)
        else:
            tokens.append(words.get(index, f"[PAD{index}]"))
            kinds.append(NORMAL if index in words else UNUSED)
    merges = [one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_text(folder: Path, out: Path, config: dict[str, Any], num_deepstack: int) -> None:
    """Write the text model; its embedding, which is its head, too, in Q8_0 as llama.cpp's tool does it."""
    writer = gguf.GGUFWriter(out, "qwen3vl")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_sections([24, 20, 20, 0])
    writer.add_num_deepstack_layers(num_deepstack)
    add_tokenizer(writer, folder, config["vocab_size"])
    for name, tensor in tensors(folder, "language_model"):
        if name == "embed_tokens.weight":
            add(writer, "token_embd.weight", tensor, gguf.GGMLQuantizationType.Q8_0)
        elif name == "norm.weight":
            add(writer, "output_norm.weight", tensor, None)
        else:
            _, layer, rest = name.split(".", 2)
            stem = TEXT_NAMES[rest.removesuffix(".weight")]
            add(writer, f"blk.{layer}.{stem}.weight", tensor, gguf.GGMLQuantizationType.Q4_0)
    finish(writer)


def vision_name(name: str, deepstack: list[int]) -> str:
    """Return llama.cpp's name of a vision tensor."""
    stem, tail = name.rsplit(".", 1)
    match stem.split("."):
        case ["blocks", layer, *rest]:
            return f"v.blk.{layer}.{BLOCK_NAMES['.'.join(rest)]}.{tail}"
        case ["merger", part]:
            return f"{MERGER_NAMES[part]}.{tail}"
        case ["deepstack_merger_list", index, part]:
            return f"v.deepstack.{deepstack[int(index)]}.{DEEPSTACK_NAMES[part]}.{tail}"
        case ["pos_embed"]:
            return "v.position_embd.weight"
    return f"v.patch_embd.{tail}"


def write_vision(folder: Path, out: Path, config: dict[str, Any], projection: int) -> None:
    """Write the vision encoder with its projector, for an output of *projection* values."""
    writer, deepstack = gguf.GGUFWriter(out, "clip"), config["deepstack_visual_indexes"]
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_projection_dim(projection)
    writer.add_vision_image_size(768)
    writer.add_vision_patch_size(config["patch_size"])
    writer.add_vision_embedding_length(config["hidden_size"])
    writer.add_vision_feed_forward_length(config["intermediate_size"])
    writer.add_vision_block_count(config["depth"])
    writer.add_vision_head_count(config["num_heads"])
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(2)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_is_deepstack_layers([layer in deepstack for layer in range(config["depth"])])
    for name, tensor in tensors(folder, "visual"):
        if name == "patch_embed.proj.weight":
            # Two kernels, one for each frame; an image is both.
            for frame, suffix in enumerate(("", ".1")):
                kernel = tensor[:, :, frame].contiguous().half().numpy()
                writer.add_tensor(f"v.patch_embd.weight{suffix}", kernel)
        else:
            is_matrix = tensor.ndim == 2 and "pos_embed" not in name
            kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else None
            add(writer, vision_name(name, deepstack), tensor.contiguous(), kind)
    finish(writer)


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write both files."""
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    write_text(folder, out / "text-q4_0.gguf", text, len(vision["deepstack_visual_indexes"]))
    write_vision(folder, out / "mmproj-q8_0.gguf", vision, text["hidden_size"])


if __name__ == "__main__":
    main()
