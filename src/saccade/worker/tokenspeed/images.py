"""Converts images from TokenSpeed's wire for the engine: normalised tensors become uint8 patches with a content hash.

A gateway sends patches as the reference processor makes them: normalised, and with equal frames for a still image. The
engine takes uint8 patches of one frame. Nothing is rounded: a value that no uint8 level yields is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade.connectors.events.sent_images import FIRST_PAD
from saccade.connectors.smg.tokenspeed_messages import PADS_PER_MODALITY, PATCHES_PER_IMAGE
from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.identity.content import HASH_BYTES
from saccade.models.family import Layout
from saccade.models.preprocessing.denormalisation import Denormaliser
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import Grid, ModelSpec
from saccade.protocol.media import ImageLayout, MediaItem, Span
from saccade.worker.tokenspeed import tensors

IMAGE = "image"
PIXEL_DTYPES = ("bfloat16", "float32")

SALT = b"saccade.tokenspeed.1"
"""The salt of all requests of this wire: their blocks and encoder outputs are never those of another wire."""

TAIL_BYTES = 8
"""A content hash ends with the first bytes of the gateway's own hash: pad values are computed from them."""


def content_hash(declared: bytes, grid: Grid, patches: npt.NDArray[np.uint8]) -> bytes:
    """Return the engine's hash of an image: 24 bytes of a digest, then the first 8 of the gateway's *declared* hash.

    The digest covers SALT, *declared*, *grid* and *patches*. The gateway's hash covers only the encoded image: it
    neither covers the processing nor proves that these pixels belong to that image.
    """
    head = b"".join((SALT, len(declared).to_bytes(8, "little"), declared, np.array(grid, "<i8").tobytes()))
    digest = blake3(head).update(np.ascontiguousarray(patches).data).digest(HASH_BYTES - TAIL_BYTES)
    return digest + declared[:TAIL_BYTES].ljust(TAIL_BYTES, b"\0")


def pad_value(content_hash: bytes) -> int:
    """Return the id that an image's tokens have in cache events, computed as in TokenSpeed (little-endian)."""
    return FIRST_PAD + int.from_bytes(content_hash[-TAIL_BYTES:], "little") % PADS_PER_MODALITY


@dataclass(frozen=True)
class ImageReader:
    """Reads images for one model. *grid_name* is the name of the tensor that holds an image's grid."""

    spec: ModelSpec
    layout: Layout
    grid_name: str
    denormaliser: Denormaliser
    takes_bfloat16: bool

    @classmethod
    def of_model(cls, spec: ModelSpec, layout: Layout, grid_name: str) -> "ImageReader":
        """Return a reader of images that are normalised with the settings of *layout*."""
        denormaliser = Denormaliser(layout.settings["image_mean"], layout.settings["image_std"])
        return cls(spec, layout, grid_name, denormaliser, denormaliser.takes_bfloat16)

    def read_image(self, item: pb.MultimodalItem, token_ids: Sequence[int], field: str) -> MediaItem:
        """Return the image in *item*, which is the *field* of a message with the prompt *token_ids*.

        This takes milliseconds. Raises a RequestError that names the field.
        """
        if item.modality != common_pb2.IMAGE:
            name = common_pb2.Modality.Name(item.modality) if item.modality in common_pb2.Modality.values() else "?"
            raise UnsupportedParameter(f"{field}.modality is {name}; this worker takes images.", field)
        self._check_placeholder(item, field)
        grid = self._grid(item, field)
        spans = tuple(Span(place.offset, place.length) for place in item.placeholders)
        self._check_tokens(spans, grid, token_ids, field)
        patches = self._patches(item, grid, f"{field}.encoder_input")
        return MediaItem(
            modality=IMAGE,
            content_hash=content_hash(item.content_hash, grid, patches),
            grid=grid,
            spans=spans,
            pixel_shape=patches.shape,
            inline=patches.tobytes(),
        )

    def _check_placeholder(self, item: pb.MultimodalItem, field: str) -> None:
        own = self.spec.placeholder_of[IMAGE]
        if item.HasField("placeholder_token_id") and item.placeholder_token_id != own:
            raise InvalidValue(
                f"{field}.placeholder_token_id is {item.placeholder_token_id}; this model's is {own}.", field
            )

    def _grid(self, item: pb.MultimodalItem, field: str) -> Grid:
        """Return the grid from the side tensors, which may hold nothing else except the number of patches."""
        tensors_by_name = dict(item.model_specific_tensors.items())
        if unknown := sorted(set(tensors_by_name) - {self.grid_name, PATCHES_PER_IMAGE}):
            raise UnsupportedParameter(
                f"{field}.model_specific_tensors has {unknown[0]!r}, which is not served.", field
            )
        if self.grid_name not in tensors_by_name:
            raise InvalidValue(f"{field}.model_specific_tensors lacks {self.grid_name!r}.", field)
        sizes = tensors.read_tensor(tensors_by_name[self.grid_name], f"{field}.{self.grid_name}").ravel().tolist()
        if len(sizes) != 3 or not all(type(size) is int and 0 < size < 1 << 20 for size in sizes):
            raise InvalidValue(f"{field}.{self.grid_name} must be the frames, rows and columns of one image.", field)
        if sizes[0] != 1:
            raise InvalidValue(f"{field}.{self.grid_name}: an image has one frame, not {sizes[0]}.", field)
        if PATCHES_PER_IMAGE in tensors_by_name:
            counts = (
                tensors.read_tensor(tensors_by_name[PATCHES_PER_IMAGE], f"{field}.{PATCHES_PER_IMAGE}").ravel().tolist()
            )
            if counts != [math.prod(sizes)]:
                raise InvalidValue(f"{field}.{PATCHES_PER_IMAGE} is {counts}; the grid {sizes} has another.", field)
        return sizes[0], sizes[1], sizes[2]

    def _check_tokens(self, spans: Sequence[Span], grid: Grid, token_ids: Sequence[int], field: str) -> None:
        """Raise InvalidValue unless the spans cover as many tokens as the grid makes, and no more than the prompt has.

        The prompt's length thus limits the size of the pixels before they are read.
        """
        num_tokens = self.spec.item_tokens(grid)
        covered = sum(span.length for span in spans)
        if covered != num_tokens or covered > len(token_ids):
            raise InvalidValue(
                f"{field}.placeholders cover {covered} of {len(token_ids)} tokens; the grid {list(grid)} makes "
                f"{num_tokens}.",
                field,
            )

    def _patches(self, item: pb.MultimodalItem, grid: Grid, field: str) -> npt.NDArray[np.uint8]:
        """Return the uint8 patches [spec.pixel_shape(grid)] in encoder_input."""
        if not item.HasField("encoder_input"):
            raise UnsupportedParameter(f"{field} is missing: an image that is encoded elsewhere is not served.", field)
        tensor = item.encoder_input
        self._check_dtype(tensor.dtype, field)
        own, external = self.spec.pixel_shape(grid), self._external_shape(grid)
        if tuple(tensor.shape) != external:
            raise InvalidValue(f"{field} has the shape {list(tensor.shape)}; the grid needs {list(external)}.", field)
        values = tensors.read_tensor(tensor, field).reshape(own[0], CHANNELS, math.prod(external) // math.prod(own), -1)
        if not all(np.array_equal(values[:, :, 0], values[:, :, other]) for other in range(1, values.shape[2])):
            raise InvalidValue(f"{field}: the frames of a still image must be equal.", field)
        try:
            return self.denormaliser.levels(values[:, :, 0]).reshape(own)
        except InvalidValue as error:
            raise InvalidValue(f"{field}: {error.message}", field) from error

    def _check_dtype(self, dtype: str, field: str) -> None:
        if dtype not in PIXEL_DTYPES:
            raise UnsupportedParameter(f"{field}.dtype is {dtype!r}; this worker takes float32 and bfloat16.", field)
        if dtype == "bfloat16" and not self.takes_bfloat16:
            raise UnsupportedParameter(
                f"{field}.dtype is bfloat16, which cannot distinguish all levels of this model's pixels; send float32, "
                "as GetModelInfo says.",
                field,
            )

    def _external_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape that the reference processor's tensor has for an image of *grid*."""
        own = ImageLayout(
            resized_height=0, resized_width=0, grid=grid, num_tokens=0, pixel_shape=self.spec.pixel_shape(grid)
        )
        return self.layout.external(own, "float32").pixel_shape
