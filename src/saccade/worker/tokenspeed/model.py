"""What TokenSpeed's wire needs to know about the served model, built from the engine's description."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from saccade import models
from saccade.models import files
from saccade.models.generation_defaults import GenerationDefaults, generation_defaults
from saccade.models.spec import ModelSpec
from saccade.protocol.description import Description
from saccade.protocol.model_files import CONFIG, TOKENIZER_CONFIG
from saccade.tokenization.loading import TokenizerNeeds, load_tokenizer
from saccade.tokenization.tokenizer import Tokenizer
from saccade.worker.tokenspeed.images import ImageReader


@dataclass(frozen=True)
class WireModel:
    """A served model. *images* is None if the wire has no form for images of the model's family."""

    description: Description
    config: Mapping[str, Any]
    spec: ModelSpec
    defaults: GenerationDefaults
    images: ImageReader | None
    _needs: TokenizerNeeds

    @classmethod
    def of_description(cls, description: Description) -> "WireModel":
        """Return the model, built from the files in *description*. Raises StartupError."""
        config = files.parse_json(description.files, CONFIG)
        name = models.family_of(config)
        family = models.families()[name]
        spec = models.load_spec(name, files.engine_config(description.files, family, description.max_model_len))
        images = None
        if family.external_grid is not None:
            layout = models.load_layout(name)(config, files.image_processor(description.files, family))
            images = ImageReader.of_model(spec, layout, family.external_grid)
        declared = family.placeholder_token_id(config)
        return cls(
            description=description,
            config=config,
            spec=spec,
            defaults=generation_defaults(description.files, family),
            images=images,
            _needs=TokenizerNeeds(family.placeholder, declared, family.tiktoken_pattern),
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded for the first request with stop strings. Raises StartupError."""
        model_files = self.description.files
        return load_tokenizer(model_files.files, files.parse_json(model_files, TOKENIZER_CONFIG), self._needs)

    @cached_property
    def bundle(self) -> tuple[bytes, str]:
        """The model's small files as a zip, and its sha256 in hexadecimal digits."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(self.description.files.files.items()):
                archive.writestr(name, content)
        content = buffer.getvalue()
        return content, hashlib.sha256(content).hexdigest()

    @property
    def pixel_dtype(self) -> str:
        """The dtype of the pixels that gateways send: bfloat16 if it distinguishes all levels, else float32."""
        return "bfloat16" if self.images is None or self.images.takes_bfloat16 else "float32"

    @property
    def sampling_defaults(self) -> str:
        """The temperature, top_p and top_k of requests that set none, as JSON."""
        defaults = self.defaults
        values = {"temperature": defaults.temperature, "top_p": defaults.top_p, "top_k": defaults.top_k or -1}
        return json.dumps(values)

    def token_id(self, name: str) -> int:
        """Return the token id under *name* in config.json or its text_config; 0 if there is none."""
        places = (self.config, self.config.get("text_config") or {})
        token_ids = (place.get(name) for place in places if isinstance(place, Mapping))
        return next((token_id for token_id in token_ids if type(token_id) is int), 0)
