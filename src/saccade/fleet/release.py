"""Compares the releases of a model that workers serve, by what can change an answer.

A Saccade worker reports its files and weights, TokenSpeed and SGLang some of the files. vLLM reports none, so the
gateway gets them from elsewhere. A part that only one of two workers reports is not compared.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.identity.content import files_digest
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.model_files import (
    CHAT_TEMPLATE_JINJA,
    CHAT_TEMPLATE_JSON,
    CONFIG,
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TIKTOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from saccade.tokenization.chat_template import find_source

REMARKS = frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_from_model_config",
        "_name_or_path",
        "_valid_processor_keys",
        "dtype",
        "image_processor_type",
        "processor_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Keys that programs write into a model's JSON files and that change no answer; workers report their dtype."""

TOKENIZER_KEYS = (
    "added_tokens_decoder",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)
"""Of tokenizer_config.json."""

TEMPLATE = "chat template"
IMAGE_PROCESSOR = "image processor"
MAX_PLACE_CHARACTERS = 200


class Compatibility:
    """Compares what workers report about a model. All workers of a model in *assumed* count as one release.

    Each pair of fingerprints is compared once, since a fingerprint covers the files of its worker.
    """

    def __init__(self, assumed: Collection[str] = ()) -> None:
        self._assumed = frozenset(assumed)
        self._differences: dict[tuple[bytes, bytes], str] = {}

    def difference(self, one: Description, other: Description) -> str:
        """Return the first difference between two releases as "file: field", or "" if they are the same."""
        return "" if one.model in self._assumed else self.reported_difference(one, other)

    def reported_difference(self, one: Description, other: Description) -> str:
        """Return the same as difference(), but also for assumed models."""
        if one.fingerprint == other.fingerprint:
            return ""
        pair = (one.fingerprint, other.fingerprint)
        if pair not in self._differences:
            self._differences[pair] = _difference(one, other)
        return self._differences[pair]


def _difference(one: Description, other: Description) -> str:
    ours, others = _parts(one), _parts(other)
    for name, part in ours.items():
        if name in others and part != others[name]:
            return ": ".join(filter(None, (name, _place(part, others[name])[:MAX_PLACE_CHARACTERS])))
    return ""


def _parts(description: Description) -> dict[str, Any]:
    """Return the parts that can change an answer, by name: JSON as values, tokenizers as bytes."""
    files = description.files.files
    parts: dict[str, Any] = {name: files[name] for name in (TOKENIZER, TIKTOKEN) if name in files}
    parts |= {name: _without_remarks(_json(files[name])) for name in (CONFIG, GENERATION_CONFIG) if name in files}
    tokenizer_config = _json(files.get(TOKENIZER_CONFIG, b"{}"))
    if TOKENIZER_CONFIG in files and isinstance(tokenizer_config, dict):
        values = {key: tokenizer_config.get(key) for key in TOKENIZER_KEYS}
        parts[TOKENIZER_CONFIG] = _without_remarks(values)
    parts |= _template(files, tokenizer_config) | _image_processor(description.files)
    # A fingerprint that is not the files' alone also covers the weights.
    if description.weights or description.fingerprint != files_digest(files):
        parts["weights"] = description.weights or description.fingerprint
    return {name: parts[name] for name in sorted(parts)}


def _template(files: Mapping[str, bytes], tokenizer_config: Any) -> dict[str, Any]:
    config = tokenizer_config if isinstance(tokenizer_config, dict) else {}
    try:
        return {TEMPLATE: find_source(files.get(CHAT_TEMPLATE_JINJA), files.get(CHAT_TEMPLATE_JSON), config)}
    except StartupError:
        return {}


def _image_processor(model_files: ModelFiles) -> dict[str, Any]:
    nested = _json(model_files.files.get(PROCESSOR_CONFIG, b"{}"))
    settings = nested.get("image_processor") if isinstance(nested, dict) else nested
    if settings is None:
        settings = _json(model_files.files.get(PREPROCESSOR_CONFIG, b"null"))
    return {} if settings is None else {IMAGE_PROCESSOR: _without_remarks(settings)}


def _json(content: bytes) -> Any:
    """Return the value of a JSON file, or its bytes if it is malformed."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content


def _without_remarks(value: Any) -> Any:
    if isinstance(value, dict):
        entries = {key: _without_remarks(inner) for key, inner in value.items() if key not in REMARKS}
        return {key: inner for key, inner in entries.items() if inner is not None}
    return value


def _place(one: Any, other: Any) -> str:
    """Return the path of the first key whose values differ, as "text_config.hidden_size", or "" without keys."""
    return ".".join(_path(one, other))


def _path(one: Any, other: Any) -> Iterator[str]:
    while isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key))
        yield key
        one, other = one.get(key), other.get(key)
