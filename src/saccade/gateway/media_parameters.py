"""The parameters of images and videos: limits for a single image or video, and JSON schemas to describe the API.

Code checks the values, because it gives better errors than a schema.
"""

from typing import Annotated, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs

FileSchema = {
    "type": ["object", "null"],
    "properties": {name: {"type": ["string", "null"]} for name in ("file_id", "file_data", "filename")},
}
PixelsSchema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31}
EdgesSchema = {
    "type": ["object", "null"],
    "properties": {"shortest_edge": PixelsSchema, "longest_edge": PixelsSchema},
    "additionalProperties": False,
}
FramesSchema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**20}
ImageSchema = {"type": ["string", "object", "null"]}
VideoSchema = {"type": ["string", "array", "object", "null"]}
IndexSchema = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**20}
FpsSchema = {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1000}
SideSchema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**15}
LimitSchemas = {
    "min_pixels": PixelsSchema,
    "max_pixels": PixelsSchema,
    "total_pixels": PixelsSchema,
    "resized_height": SideSchema,
    "resized_width": SideSchema,
    "num_frames": FramesSchema,
    "min_frames": FramesSchema,
    "max_frames": FramesSchema,
    "fps": FpsSchema,
}
ProcessorSchema = {
    "properties": {**LimitSchemas, "size": EdgesSchema},
    "additionalProperties": False,
}
MediaIoSchema = {
    "properties": {
        "image": {"type": ["object", "null"], "maxProperties": 0},
        "video": {
            "type": ["object", "null"],
            "properties": {
                "num_frames": FramesSchema,
                "fps": FpsSchema,
                "frames_indices": {"type": ["array", "null"], "items": IndexSchema, "maxItems": 768},
                "total_num_frames": FramesSchema,
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
Pixels = Annotated[Raw | UnsetType, Meta(extra_json_schema=PixelsSchema)]
Side = Annotated[Raw | UnsetType, Meta(extra_json_schema=SideSchema)]
Frames = Annotated[Raw | UnsetType, Meta(extra_json_schema=FramesSchema)]
Rate = Annotated[Raw | UnsetType, Meta(extra_json_schema=FpsSchema)]


class ImageLimits(Struct, frozen=True, kw_only=True):
    """The limits of one image; `mm_processor_kwargs` sets the same for all images. prompt.media_options reads both."""

    min_pixels: Pixels = UNSET
    max_pixels: Pixels = UNSET
    resized_height: Side = UNSET
    resized_width: Side = UNSET


class MediaLimits(ImageLimits, frozen=True, kw_only=True):
    """The limits of one image or video. *nframes* is another name for *num_frames*, and *sample_fps* for *fps*."""

    total_pixels: Pixels = UNSET
    fps: Rate = UNSET
    sample_fps: Rate = UNSET
    num_frames: Frames = UNSET
    nframes: Frames = UNSET
    min_frames: Frames = UNSET
    max_frames: Frames = UNSET


Limited = TypeVar("Limited", bound=ImageLimits)


LIMITS = MediaLimits.__struct_fields__
LIMITS_OF_IMAGES = ImageLimits.__struct_fields__


def limits_of(holder: ImageLimits) -> dict[str, Raw]:
    """Return the limits that *holder* sets, by name."""
    return {
        name: value
        for name in LIMITS
        if (value := getattr(holder, name, UNSET)) is not UNSET and bytes(value) != b"null"
    }


def with_limits(target: Limited, holder: ImageLimits) -> Limited:
    """Return *target* with the limits that *holder* sets."""
    limits = limits_of(holder)
    return structs.replace(target, **limits) if limits else target
