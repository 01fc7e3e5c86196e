"""Computes what an image costs a model, from the model's files. Does not import torch."""

import math
from dataclasses import dataclass

from saccade import models
from saccade.gateway.prompt.media_options import default_image_options
from saccade.models.files import engine_config, image_processor, parse_json
from saccade.models.spec import NETWORK_DTYPE, Recurrent
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG

EXAMPLE = (1280, 960)
"""Width and height of the image that costs are shown for."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class ImageCost:
    """One image's cost.

    - num_tokens: in the prompt.
    - num_patches: for the vision encoder.
    - kv_bytes, encoder_bytes: in the KV cache and in the encoder cache.
    - checkpoint_bytes: of one checkpoint of recurrent states; 0 for a model that has none.
    """

    num_tokens: int
    num_patches: int
    kv_bytes: int
    encoder_bytes: int
    checkpoint_bytes: int


def image_cost(
    files: ModelFiles,
    dtype: str,
    kv_cache_dtype: str = "",
    size: tuple[int, int] = EXAMPLE,
    processor_kwargs: str | None = None,
) -> ImageCost:
    """Return the cost of an image of *size*, (width, height) in pixels, if its request has no settings of its own.

    *dtype* is the network's, a key of DTYPE_BYTES; *kv_cache_dtype* is the same unless it is given. *processor_kwargs*
    are --mm-processor-kwargs. Raises StartupError if a file is wrong, and RequestError if the model refuses the image.
    """
    config = parse_json(files, CONFIG)
    name = models.family_of(config)
    family = models.families()[name]
    family_layout = models.load_layout(name)(config, image_processor(files, family))
    options = default_image_options(processor_kwargs, family)
    layout = family_layout.image(*size, family_layout.settings_for(options))
    spec = models.load_spec(name, engine_config(files, family))
    states = [kv_spec for kv_spec in spec.kv_specs if isinstance(kv_spec, Recurrent)]
    paged = [kv_spec for kv_spec in spec.kv_specs if not isinstance(kv_spec, Recurrent)]
    values = sum(kv_spec.token_values * kv_spec.num_kept(layout.num_tokens) for kv_spec in paged)
    tensors = (pair for state in states for pair in zip(state.shapes, state.dtypes, strict=True))
    return ImageCost(
        num_tokens=layout.num_tokens,
        num_patches=spec.encode_cost(layout.grid),
        kv_bytes=values * DTYPE_BYTES[kv_cache_dtype or dtype],
        encoder_bytes=spec.encoder_output_values(layout.grid, layout.original_size) * DTYPE_BYTES[dtype],
        checkpoint_bytes=sum(
            math.prod(shape) * DTYPE_BYTES[dtype if own == NETWORK_DTYPE else own] for shape, own in tensors
        ),
    )
