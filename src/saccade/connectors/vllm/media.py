"""Writes images in the form in which vLLM's own processor leaves them, for requests with token ids.

vLLM takes each tensor with its name, dtype and shape, and with the way to join the tensors of several images. These
depend on the model, version and flags. So the worker is asked once to process an image, and later images are written
in the form of its answer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pybase64

from saccade.errors import InternalError, StartupError, UnsupportedParameter
from saccade.protocol.media import BYTES_PER_VALUE, NUMPY_DTYPE, MediaItem
from saccade.transport.framing import UNREADABLE

PROBE_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PMQ0AAAwDoEqv9ErYvQQckD4XAQEBAQEBAQ"
    "EBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAYHLAB8+AWnmfUycAAAAAElFTkSuQmCC"
)
"""A grey image of 64 x 64 pixels."""

PROBE_IDENTIFIER = "saccade-probe"
"""No request has this identifier, so no cache of the worker takes the probe for another image."""

RAW = 3
"""The msgpack extension of vLLM's raw tensors (vllm/v1/serial_utils.py)."""

CHANNELS = 3


@dataclass(frozen=True)
class ImageForm:
    """The names and types of an image's two tensors: its patches, and its int64 grid.

    *modality* is the request's name for images. *pixels_shape* is one patch's. *pixels_field* and *grid_field* say how
    vLLM joins the tensors of several images; the former lacks the number of patches.
    """

    modality: str
    pixels_name: str
    pixels_dtype: str
    pixels_shape: tuple[int, ...]
    pixels_field: Mapping[str, Any]
    grid_name: str
    grid_field: Any


def probe_body(model: str) -> bytes:
    """Return the body that asks /render for a chat with one image."""
    image = {"type": "image_url", "image_url": {"url": PROBE_IMAGE}, "uuid": PROBE_IDENTIFIER}
    content = [image, {"type": "text", "text": "What is it?"}]
    return msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1})


def read_form(rendered: Any) -> ImageForm:
    """Return the form in the worker's answer to /render for a chat with one image.

    Raises StartupError for a form that Saccade cannot write.
    """
    try:
        ((modality, (data,)),) = rendered["features"]["kwargs_data"].items()
        tensors = msgspec.msgpack.decode(pybase64.b64decode(data, validate=True))
        tensors_by_name = {name: (*tensor["data"], *tensor["field"]) for name, tensor in tensors.items()}
        ((grid_name, grid),) = ((name, tensor) for name, tensor in tensors_by_name.items() if tensor[0] == "int64")
        ((name, pixels),) = ((name, tensor) for name, tensor in tensors_by_name.items() if name != grid_name)
        dtype, (num_patches, *shape), _, joined, field = pixels
        counts = np.frombuffer(grid[2].data, "<i8")
        is_known = joined == "flat" and field["dim"] == 0 and grid[3] == "batched" and grid[1] == [len(counts)]
    except (AttributeError, LookupError, TypeError, ValueError, *UNREADABLE) as error:
        raise StartupError("its images are not two tensors, patches and grid") from error
    if dtype not in BYTES_PER_VALUE or not is_known or math.prod(counts) != num_patches:
        raise StartupError(f"its patches of {dtype} are not joined as they would be here")
    rest = {key: value for key, value in field.items() if key != "slices"}
    return ImageForm(modality, name, dtype, tuple(shape), rest, grid_name, list(grid[3:]))


def encoded(form: ImageForm, item: MediaItem) -> bytes:
    """Return *item*, whose pixels are inline, as base64 of vLLM's msgpack.

    Raises UnsupportedParameter if the form does not fit the image's patches.
    """
    pixels = _pixels(form, item)
    slices = [[[0, item.pixel_shape[0], None]]]
    grid = np.array(item.grid, "<i8").tobytes()
    tensors = {
        form.pixels_name: {
            "data": [form.pixels_dtype, [item.pixel_shape[0], *form.pixels_shape], msgspec.msgpack.Ext(RAW, pixels)],
            "field": ["flat", {**form.pixels_field, "slices": slices}],
        },
        form.grid_name: {
            "data": ["int64", [len(item.grid)], msgspec.msgpack.Ext(RAW, grid)],
            "field": form.grid_field,
        },
    }
    return pybase64.b64encode(msgspec.msgpack.encode(tensors))


def _pixels(form: ImageForm, item: MediaItem) -> bytes:
    """Return the patches in the worker's shape: raw patches have one frame here and several, all alike, in vLLM."""
    if item.inline is None:
        raise InternalError("An image came without pixels, which this worker does not hold.")
    own, theirs = math.prod(item.pixel_shape[1:]), math.prod(form.pixels_shape)
    if item.pixel_dtype != form.pixels_dtype or len(item.spans) != 1 or not own or theirs % own or own % CHANNELS:
        raise UnsupportedParameter("The images of this model cannot be sent to this worker as token ids.", "messages")
    if theirs == own:
        return item.inline
    patches = np.frombuffer(item.inline, NUMPY_DTYPE[item.pixel_dtype]).reshape(-1, CHANNELS, 1, own // CHANNELS)
    return np.repeat(patches, theirs // own, axis=2).tobytes()
