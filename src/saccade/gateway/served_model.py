"""ServedModel: what a gateway makes of a worker's description, once per model."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from saccade import models
from saccade.errors import StartupError, WorkerUnavailable
from saccade.gateway.workers import Fleet, Model
from saccade.identity.content import files_digest, processor_fingerprint
from saccade.media.decode import DECODER
from saccade.models import files
from saccade.models.family import Family, Layout
from saccade.protocol.description import Description, ModelFiles
from saccade.tokenization.chat_template import ChatTemplate, find_source
from saccade.tokenization.loading import load_tokenizer
from saccade.tokenization.tokenizer import Tokenizer, special_variables

PROCESSOR_FILES = (files.CONFIG, files.PREPROCESSOR_CONFIG)
PROBE = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},)
"""The shortest chat with a picture; a template must write exactly one placeholder for it."""

_logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class GenerationDefaults:
    """What holds where a request says nothing, from generation_config.json."""

    temperature: float
    top_p: float
    top_k: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServedModel:
    """Everything that requests for one model need. *files_digest* names the files that decide about pixels."""

    name: str
    family: str
    tokenizer: Tokenizer
    template: ChatTemplate
    placeholder_token_id: int
    layout: Layout
    files_digest: bytes
    defaults: GenerationDefaults
    max_model_len: int
    created: int

    @classmethod
    def from_description(cls, description: Description) -> "ServedModel":
        """Build the gateway's half of a model from what its worker sent. Raises StartupError."""
        return cls.from_files(description.model, description.files, description.max_model_len)

    @classmethod
    def from_files(cls, name: str, given: ModelFiles, max_model_len: int) -> "ServedModel":
        """Build the gateway's half of a model from its files. Raises StartupError."""
        config = files.parse_json(given, files.CONFIG)
        family = models.family_of(config)
        layout = models.load_layout(family)(config, files.parse_json(given, files.PREPROCESSOR_CONFIG))
        text = _text_side(models.families()[family], config, given)
        digest = files_digest({file: given.files[file] for file in PROCESSOR_FILES if file in given.files})
        return cls(
            name=name,
            family=family,
            tokenizer=text.tokenizer,
            template=text.template,
            placeholder_token_id=text.placeholder_token_id,
            layout=layout,
            files_digest=digest,
            defaults=generation_defaults(files.parse_json(given, files.GENERATION_CONFIG), config),
            max_model_len=max_model_len,
            created=int(time.time()),
        )

    def fingerprint(self, settings: Mapping[str, Any]) -> bytes:
        """Return what enters the content hash of a picture that is processed with *settings*."""
        return processor_fingerprint(settings, self.files_digest, DECODER)


@dataclass(frozen=True)
class _TextSide:
    """What turns a chat into token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate
    placeholder_token_id: int


def _text_side(family: Family, config: Mapping[str, Any], given: ModelFiles) -> _TextSide:
    """Return tokenizer, template and placeholder, which must agree about pictures. Raises StartupError."""
    tokenizer_config = files.parse_json(given, files.TOKENIZER_CONFIG)
    declared = family.placeholder_token_id(config)
    tokenizer = load_tokenizer(given.files, tokenizer_config, family.placeholder, declared)
    token_id = tokenizer.special_tokens.get(family.placeholder) if declared is None else declared
    if token_id is None:
        raise StartupError(
            f"Nothing stands for pictures: config.json has none of {', '.join(family.placeholder_keys)}, and the "
            f"tokenizer has no token {family.placeholder}."
        )
    jinja, template_json = given.files.get(files.CHAT_TEMPLATE_JINJA), given.files.get(files.CHAT_TEMPLATE_JSON)
    source = find_source(jinja, template_json, tokenizer_config)
    template = ChatTemplate(source, tokenizer.special_tokens, special_variables(tokenizer_config))
    if tokenizer.encode(template.render(PROBE)).count(token_id) != 1:
        raise StartupError("The chat template does not write exactly one placeholder for one picture.")
    return _TextSide(tokenizer, template, token_id)


def generation_defaults(generation: Mapping[str, Any], config: Mapping[str, Any]) -> GenerationDefaults:
    """Return the defaults in generation_config.json; end-of-sequence ids else from config.json. Raises StartupError."""
    text_config = config.get("text_config") or {}
    eos: int | list[int] = next(
        (c["eos_token_id"] for c in (generation, config, text_config) if c.get("eos_token_id") is not None), []
    )
    eos_token_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    temperature = generation.get("temperature", 1.0) if generation.get("do_sample", True) else 0.0
    defaults = GenerationDefaults(
        temperature=temperature,
        top_p=generation.get("top_p", 1.0),
        top_k=generation.get("top_k", 0),
        eos_token_ids=eos_token_ids,
    )
    numbers = (defaults.temperature, defaults.top_p, defaults.top_k, *eos_token_ids)
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        raise StartupError(f"{files.GENERATION_CONFIG}: temperature, top_p, top_k and eos_token_id must be numbers.")
    return defaults


class Catalogue:
    """The served models of a fleet, built as workers describe them; one that cannot be built is logged, not served."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._served: dict[str, ServedModel] = {}
        self._described: dict[str, Description] = {}
        self._building: set[asyncio.Task[None]] = set()
        fleet.on_model(self._on_model)
        for model in fleet.models():
            self._on_model(model)

    @property
    def ready(self) -> bool:
        """Whether a worker is ready and its model is built."""
        return self._fleet.ready and any(model.workers and model.name in self._served for model in self._fleet.models())

    def models(self) -> list[ServedModel]:
        """Return the models that can be asked for, ready or not."""
        return [self._served[model.name] for model in self._fleet.models() if model.name in self._served]

    def get(self, name: str) -> ServedModel:
        """Return the model *name*. Raises ModelNotFound and WorkerUnavailable."""
        self._fleet.model(name)
        if name not in self._served:
            raise WorkerUnavailable(f"The model {name!r} is not ready yet; try again shortly.")
        return self._served[name]

    def _on_model(self, model: Model) -> None:
        self._served.pop(model.name, None)
        self._described[model.name] = model.description
        task = asyncio.create_task(self._build(model.description), name=f"model {model.name}")
        self._building.add(task)
        task.add_done_callback(self._building.discard)

    async def _build(self, description: Description) -> None:
        try:
            served = await asyncio.to_thread(ServedModel.from_description, description)
        except StartupError as error:
            _logger.error("model cannot be served", model=description.model, reason=error.message)
        except Exception:
            # A task of its own: what nobody foresaw in a checkpoint's files must not pass unseen.
            _logger.exception("model cannot be served", model=description.model)
        else:
            # Builds run side by side; what the workers said last holds, not what was built last.
            if self._described[description.model] is description:
                self._served[description.model] = served
