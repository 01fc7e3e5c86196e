"""Finds the tokens that end an answer, in every place where a release can name one."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from saccade.errors import StartupError
from saccade.models import files
from saccade.models.family import Family
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG

TEXT_SECTIONS: Final = ("text_config", "llm_config")
"""The sections of config.json that describe a text network, in any form of release."""

OF_CLASS: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "Qwen2Tokenizer": "<|endoftext|>",
        "GPT2Tokenizer": "<|endoftext|>",
        "LlamaTokenizer": "</s>",
        "GemmaTokenizer": "<eos>",
        "PreTrainedTokenizer": None,
        "TokenizersBackend": None,
    }
)
"""The default of `eos_token` by the tokenizer's class: transformers 5.23. Families know that of their own classes."""


def end_token_ids(model_files: ModelFiles, family: Family) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer, each once, with generation_config.json's ids first.

    Other ids come from config.json, its sections for the text network, and tokenizer_config.json. A tokenizer's end
    token that has no id in its files does not count, because no model samples it. If no file names one, the default of
    the text network's class counts. Raises StartupError.
    """
    config = files.parse_json(model_files, CONFIG)
    ids = [*_stated(GENERATION_CONFIG, files.parse_json(model_files, GENERATION_CONFIG)), *_stated(CONFIG, config)]
    for key in TEXT_SECTIONS:
        if isinstance(section := config.get(key), Mapping):
            ids += _stated(CONFIG, section)
    token = _of_tokenizer(files.parse_json(model_files, TOKENIZER_CONFIG), config, family)
    if token is not None and (token_id := files.token_id(model_files, family, token)) is not None:
        ids.append(token_id)
    return tuple(dict.fromkeys(ids)) or tuple(_of_text_class(config, family))


def _stated(file: str, section: Mapping[str, Any]) -> Iterator[int]:
    stated = section.get("eos_token_id")
    for token_id in stated if isinstance(stated, list) else () if stated is None else (stated,):
        if type(token_id) is not int or token_id < 0:
            raise StartupError(f"{file}: eos_token_id must be a whole number or a list of them, not {stated!r}.")
        yield token_id


def _of_text_class(config: Mapping[str, Any], family: Family) -> Iterator[int]:
    """Yield the default of the text network's class, unless its section sets null or its vocabulary is too small."""
    section = next((one for key in TEXT_SECTIONS if isinstance(one := config.get(key), Mapping)), config)
    end, vocab_size = family.text_end_id, section.get("vocab_size")
    if end is not None and "eos_token_id" not in section and not (type(vocab_size) is int and vocab_size <= end):
        yield end


def _of_tokenizer(tokenizer: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> str | None:
    """Return the tokenizer's `eos_token`, None if that is null, or its class's default if the key is missing."""
    if "eos_token" not in tokenizer:
        named = tokenizer.get("tokenizer_class") or config.get("tokenizer_class")
        return OF_CLASS.get(str(named).removesuffix("Fast"), family.text_end)
    match tokenizer["eos_token"]:
        case None:
            return None
        case str(content) | {"content": str(content)}:
            return content
        case given:
            raise StartupError(
                f"{TOKENIZER_CONFIG}: eos_token must be a text or an object with `content`, not {given!r}."
            )
