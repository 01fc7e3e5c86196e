"""transformers' configuration of a model, from config.json, and what it refuses. Does not import torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from saccade.errors import NotInstalled, StartupError

OWN_KEYS = frozenset({"max_model_len", "placeholder_token_id", "drafts", "model_impl"})
"""Keys that models.files adds to config.json."""

DEPENDENT_ROTATIONS = frozenset({"dynamic", "longrope"})
"""Rotations that depend on the longest sequence of a step, so on other requests."""


def read_configuration(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration for config.json. Raises StartupError for what it lacks or refuses."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise NotInstalled(
            "--model-impl transformers needs an extra: pip install 'saccade-vlm[transformers]'."
        ) from error
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise StartupError(
            f"config.json: transformers has no model_type {kind!r}. Code that comes with a model is not run."
        )
    own = {key: value for key, value in config.items() if key not in OWN_KEYS}
    try:
        configuration = CONFIG_MAPPING[str(kind)].from_dict(own)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StartupError(
            "config.json: transformers cannot read it; a value is missing or of a wrong kind."
        ) from error
    for path, value in _values(configuration.to_dict()):
        if path.endswith("rope_type") and value in DEPENDENT_ROTATIONS:
            raise StartupError(
                f"config.json: {path} is {value}, which makes positions depend on other requests; it is not served for "
                "any architecture."
            )
        if "deepstack" in path and value:
            raise StartupError(f"config.json: {path}: features for several layers are not served for any architecture.")
    if config.get("quantization_config") is not None:
        raise StartupError("config.json: quantised weights are not served for any architecture.")
    return configuration


def _values(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value below *node* with its path. A list is a value."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _values(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node
