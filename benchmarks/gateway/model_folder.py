"""Model folders without weights: a byte-level tokenizer with a family's specials, its configs, a chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HALF = [0.5, 0.5, 0.5]


@dataclass(frozen=True)
class Recipe:
    """What distinguishes a family's folder; {name} in *config* is the id of that special token."""

    specials: tuple[str, ...]
    end: str
    before: str
    between: str
    image: str
    after: str
    opening: str
    config: dict[str, Any]
    preprocessor: dict[str, Any]


QWEN3_VL = Recipe(
    specials=("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    end="<|im_end|>",
    before="<|im_start|>{{ message.role }}",
    between="\n",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    after="<|im_end|>\n",
    opening="<|im_start|>assistant\n",
    config={
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    preprocessor={
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": HALF,
        "image_std": HALF,
    },
)
KIMI_K25 = Recipe(
    specials=(
        "[EOS]",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_end|>",
        "<|media_pad|>",
    ),
    end="<|im_end|>",
    before="<|im_{{ message.role }}|>{{ message.role }}",
    between="<|im_middle|>",
    image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    after="<|im_end|>",
    opening="<|im_assistant|>assistant<|im_middle|>",
    config={
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "media_placeholder_token_id": "<|media_pad|>",
        "vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]},
    },
    preprocessor={
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_size": 14,
            "image_mean": HALF,
            "image_std": HALF,
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 4096,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        }
    },
)
RECIPES = {"qwen3_vl": QWEN3_VL, "kimi_k25": KIMI_K25}


def write_model(folder: Path, family: str) -> Path:
    """Write the folder of *family*, a key of RECIPES, and return it."""
    recipe = RECIPES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(recipe.specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in recipe.specials}
    text = {"vocab_size": 512, "hidden_size": 64, "eos_token_id": ids[recipe.end]}
    named = {key: ids.get(value, value) if isinstance(value, str) else value for key, value in recipe.config.items()}
    contents = {
        "config.json": {**named, "eos_token_id": ids[recipe.end], "text_config": text},
        "generation_config.json": {"eos_token_id": ids[recipe.end]},
        "preprocessor_config.json": recipe.preprocessor,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 262144,
            "eos_token": recipe.end,
            "pad_token": recipe.end,
            "additional_special_tokens": list(recipe.specials),
            "added_tokens_decoder": {str(ids[token]): _added(token) for token in recipe.specials},
            "chat_template": _template(recipe),
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


def _tokenizer(specials: tuple[str, ...]) -> Tokenizer:
    """Return a tokenizer that has a token for every byte and for every special, so that nothing need be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def _added(token: str) -> dict[str, Any]:
    no = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": token, "special": True, **no}


def _template(recipe: Recipe) -> str:
    """Return a template that takes strings and lists of parts; SMG calls a part image, OpenAI image_url."""
    return (
        "{%- for message in messages %}" + recipe.before + recipe.between + "{%- if message.content is string %}"
        "{{ message.content }}{%- else %}{%- for part in message.content %}"
        "{%- if part.type in ('image', 'image_url') %}" + recipe.image + "{%- elif part.type == 'text' %}"
        "{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}" + recipe.after + "{%- endfor %}"
        "{%- if add_generation_prompt %}" + recipe.opening + "{%- endif %}"
    )
