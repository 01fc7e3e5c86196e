"""A key that a configuration leaves out has the default of its class in transformers, in every section and family. # A1

Each key of a tiny checkpoint's sections is left out alone. The spec, or the reason of a refusal, must be that of the key
with the value that the class gives it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from checkpoints import NETWORKS

from saccade import models
from saccade.errors import StartupError
from saccade.models.files import engine_config, image_processor, parse_json, read_model_files
from saccade.protocol.description import ModelFiles

FLAT = ""
"""The section of a configuration whose text network's keys are at the top level."""

RELEASE = {
    "vt_num_hidden_layers": "num_hidden_layers", "vt_hidden_size": "hidden_size", "vt_num_attention_heads":
    "num_attention_heads", "vt_intermediate_size": "intermediate_size", "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width", "init_pos_emb_time": "pos_emb_time",
}  # fmt: skip
"""The names of transformers for keys that only the class of a release has."""

OUTSIDE = {"tie_word_embeddings", "model_type", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys that name things, and the one that the top level decides."""

ROPE = ("rope_scaling", "rope_parameters")
IN_ROPE = ("rope_theta", "partial_rotary_factor")
"""Keys that transformers moves into a section of their own."""


class Section(NamedTuple):
    """A section of a configuration, and transformers' class of it."""

    name: str
    cls: type[transformers.PreTrainedConfig]

    def of(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the section's keys in *config*."""
        return config if self.name == FLAT else config[self.name]

    def changed(self, config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
        """Return *config* with another *value* of *key*; `...` leaves it out."""
        made = deepcopy(config)
        own = self.of(made)
        own.pop(key)
        if value is not ...:
            own[key] = value
        return made


def sections(config: dict[str, Any]) -> Iterator[Section]:
    """Yield the sections of *config* whose class transformers has."""
    if config["model_type"] == "phi3_v":
        yield Section(FLAT, transformers.Phi3Config)
        return
    whole = transformers.CONFIG_MAPPING[config["model_type"]]
    for name in ("text_config", "vision_config"):
        spec = whole.sub_configs_defaults[name]
        cls = getattr(spec, "config_class", spec)
        if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedConfig):
            kind = (config.get(name) or {}).get("model_type", spec.model_type)
            cls = transformers.CONFIG_MAPPING[{"kimi_k2": "deepseek_v3"}.get(kind, kind)]
        if name in config:
            yield Section(name, cls)
        elif name == "text_config":
            yield Section(FLAT, cls)


def has_other_name(section: Section, config: dict[str, Any], key: str) -> bool:
    """Whether the section also has the release's name of *key*, with which it must agree."""
    return any(name in section.of(config) for name, other in RELEASE.items() if other == key)


def value_in(made: transformers.PreTrainedConfig, key: str) -> Any:
    """Return the value of *key*, that of all layers if some have their own; `...` if there is none."""
    made.allow_global_per_layer_attribute_access = True
    return getattr(made, key, ...)


def default_of(section: Section, config: dict[str, Any], key: str) -> Any:
    """Return what the class gives *key* beside the others, `...` for a key that it does not have."""
    others = {name: deepcopy(value) for name, value in section.of(config).items() if name not in {*OUTSIDE, *ROPE, key}}
    if section.name == FLAT:
        fields = vars(section.cls())
        others = {name: value for name, value in others.items() if name in fields}
    if key == "num_hidden_layers":
        others.pop("layer_types", None)
    made = section.cls(**others)
    if key in IN_ROPE:
        return made.rope_parameters.get(key, ...)
    value = value_in(made, RELEASE.get(key, key))
    return list(value) if isinstance(value, tuple) else value


class Reader:
    """Reads a tiny checkpoint with other configurations."""

    def __init__(self, folder: Path) -> None:
        self._files = read_model_files(folder)
        self.config: dict[str, Any] = json.loads(self._files.files["config.json"])

    def outcome(self, config: Mapping[str, Any]) -> Any:
        """Return the spec of *config*, or the sentence that refuses it."""
        changed = ModelFiles(files={**self._files.files, "config.json": json.dumps(config).encode()})
        family = models.family_of(config)
        try:
            return models.load_spec(family, engine_config(changed, models.families()[family]))
        except StartupError as error:
            return error.message


def image_settings(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Any:
    """Return the settings of a release's images, or the sentence that refuses them."""
    try:
        return models.load_layout(models.family_of(config))(config, preprocessor).settings
    except StartupError as error:
        return error.message


@pytest.fixture
def reader(name: str, network_folder: Callable[[str], Path]) -> Reader:
    return Reader(network_folder(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_embedding_is_the_head_by_default_if_the_class_says_so(name: str, reader: Reader) -> None:
    config = deepcopy(reader.config)
    for keys in (config, *(part for part in config.values() if isinstance(part, dict))):
        keys.pop("tie_word_embeddings", None)
    kind = config["model_type"]
    made = transformers.Phi3Config if kind == "phi3_v" else transformers.CONFIG_MAPPING[kind]
    assert reader.outcome(config).text.tied == made().tie_word_embeddings


@pytest.mark.parametrize("name", NETWORKS)
def test_key_that_is_left_out_has_the_default_of_its_class(name: str, reader: Reader) -> None:
    wrong, num_keys = [], 0
    for section in sections(reader.config):
        for key in sorted(section.of(reader.config).keys() - OUTSIDE - {*ROPE}):
            if (value := default_of(section, reader.config, key)) is ... or has_other_name(section, reader.config, key):
                continue
            num_keys += 1
            without, stated = (reader.outcome(section.changed(reader.config, key, one)) for one in (..., value))
            if without != stated:
                wrong.append((section.name, key, value, without, stated))
    assert wrong == []
    assert num_keys > 10


@pytest.mark.parametrize("name", NETWORKS)
def test_tables_have_the_values_of_the_classes(name: str, reader: Reader) -> None:
    """Also where one value of a tiny checkpoint's would be refused beside the others."""
    spec = reader.outcome(reader.config)
    tables = {"text_config": spec.text.style.defaults, "vision_config": getattr(type(spec.vision), "defaults", {})}
    wrong = []
    for section in sections(reader.config):
        made = section.cls()
        table = tables[section.name or "text_config"]
        for key, value in table.items():
            if key in ROPE or (key in IN_ROPE and not table.keys().isdisjoint(ROPE)):
                continue  # a whole section, which the family's own tests compare
            if key in IN_ROPE:
                own = made.rope_parameters.get(key, value)
            else:
                own = value if (own := value_in(made, key)) is ... else own
            if (list(own) if isinstance(own, tuple) else own) != value:
                wrong.append((section.name, key, value, own))
    assert wrong == []


@pytest.mark.parametrize("name", NETWORKS)
def test_all_keys_that_equal_the_default_may_be_absent_together(name: str, reader: Reader) -> None:
    trimmed = deepcopy(reader.config)
    for section in sections(reader.config):
        for key in section.of(reader.config).keys() - OUTSIDE - {*ROPE}:
            stated = section.of(reader.config)[key]
            if default_of(section, reader.config, key) == stated:
                del section.of(trimmed)[key]
    assert reader.outcome(trimmed) == reader.outcome(reader.config)


@pytest.mark.parametrize("name", NETWORKS)
def test_null_is_read_as_transformers_reads_it(name: str, reader: Reader) -> None:
    """Where its class takes null, for the value that the class makes of it; elsewhere the start may be refused."""
    wrong = []
    for section in sections(reader.config):
        for key in sorted(section.of(reader.config).keys() - OUTSIDE - {*ROPE, *IN_ROPE}):
            nulled = section.changed(reader.config, key, None)
            others = {one: value for one, value in section.of(nulled).items() if one not in {*OUTSIDE, *ROPE}}
            if section.name == FLAT:
                others = {one: value for one, value in others.items() if one in vars(section.cls())}
            try:
                value = value_in(section.cls(**deepcopy(others)), key)
            except Exception:  # a class refuses null in its own ways
                continue
            ours = reader.outcome(nulled)
            if value not in (None, ...) and ours != (
                theirs := reader.outcome(section.changed(reader.config, key, value))
            ):
                wrong.append((section.name, key, value, ours, theirs))
    assert wrong == []


@pytest.mark.parametrize("name", NETWORKS)
def test_rotary_keys_that_are_left_out_have_the_defaults_of_the_class(name: str, reader: Reader) -> None:
    """In the section of the newer form, and without any section."""
    wrong = []
    for section in sections(reader.config):
        own = section.of(reader.config)
        if section.name == "vision_config" or name.startswith("gemma4") or name == "phi3_v":
            continue
        bare = deepcopy(reader.config)
        for key in (*ROPE, *IN_ROPE):
            section.of(bare).pop(key, None)
        stated = {key: own[key] for key in IN_ROPE if key in own} | (own.get("rope_scaling") or own.get(ROPE[1]) or {})
        stated = {"rope_type": "default", **{key: value for key, value in stated.items() if key != "type"}}
        for key in ("rope_theta", "rope_type", "partial_rotary_factor", None):
            given = {} if key is None else {one: value for one, value in stated.items() if one != key}
            defaults = section.cls(rope_parameters=deepcopy(given)).rope_parameters
            filled = {
                one: defaults[one] for one in ("rope_theta", "rope_type", "partial_rotary_factor") if one in defaults
            }
            outcomes = []
            for rope in (given, {**given, **filled}):
                changed = deepcopy(bare)
                section.of(changed)["rope_parameters"] = rope
                outcomes.append(reader.outcome(changed))
            if outcomes[0] != outcomes[1]:
                wrong.append((section.name, key, *outcomes))
    assert wrong == []


OF_THE_TOWER = {"patch_size", "size"}
"""Left out, these are the tower's where the class has one value for several towers."""


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"phi3_v"}))
def test_settings_of_images_that_are_left_out_have_the_defaults_of_the_class(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(name)
    files = read_model_files(folder)
    config = parse_json(files, "config.json")
    stated = image_processor(files, models.families()[models.family_of(config)])
    defaults = type(transformers.AutoImageProcessor.from_pretrained(folder))().to_dict()
    wrong = []
    for key, value in defaults.items():
        others = {one: own for one, own in stated.items() if one != key}
        settings = image_settings(config, {**others, key: list(value) if isinstance(value, tuple) else value})
        for own in (others, {**others, key: None}):
            if key not in OF_THE_TOWER and image_settings(config, own) != settings:
                wrong.append((key, value, image_settings(config, own), settings))
    assert wrong == []
