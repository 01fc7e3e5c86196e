"""Reads the source and the options of an image, a file or a video from a part of a message."""

from typing import Final

import msgspec
from msgspec import UNSET

from saccade.errors import InvalidImageUrl, InvalidValue, UnsupportedParameter
from saccade.gateway.chat_request import ContentPart, FileSource, ImageUrl, VideoUrl
from saccade.gateway.image_source import ImageSource, url_of_file
from saccade.gateway.json_body import decode
from saccade.gateway.prompt.media_options import MediaOptions

FILE_DATA: Final = ("data:image/", "data:application/pdf")
_FILE: Final = msgspec.json.Decoder(FileSource)
_IMAGE: Final = msgspec.json.Decoder(ImageUrl | str | None)
_VIDEO: Final = msgspec.json.Decoder(VideoUrl | list[str] | str | None)


def image_source(part: ContentPart, field: str, options: MediaOptions) -> ImageSource:
    """Return the source of the image in *part*, the value of *field*: a URL or a file.

    Raises a RequestError that names the field. A `uuid` next to an image is ignored; a `uuid` without an image is
    refused.
    """
    if part.type == "file":
        return _file_source(part, f"{field}.file", options)
    reason = " A `uuid` cannot stand for the image: send the image itself." if part.uuid is not None else ""
    image = part.image_url
    if part.type == "image" and part.image is not UNSET:
        image = decode(part.image, _IMAGE, f"{field}.image")
    place, within = f"{field}.{part.type}", image if isinstance(image, ImageUrl) else None
    url, place = (image, place) if not isinstance(image, ImageUrl) else (image.url, f"{place}.url")
    _check(url, place, reason)
    options = options.of_part(part, within, field, part.type)
    detail = part.detail if within is None or within.detail is None else within.detail
    if part.detail not in (None, detail):
        raise InvalidValue(f"`{field}` has two different `detail`s; send one.", f"{field}.detail")
    return ImageSource(place, url or "", options.of_images(detail or "auto"), limits=options.paths)


def video_source(part: ContentPart, field: str, options: MediaOptions) -> ImageSource:
    """Return the source of the video in *part*, as image_source() does for an image. A `uuid` is ignored."""
    video = part.video_url
    if part.type == "video" and part.video is not UNSET:
        video = decode(part.video, _VIDEO, f"{field}.video")
    place, within = f"{field}.{part.type}", video if isinstance(video, VideoUrl) else None
    url, place = (video, place) if not isinstance(video, VideoUrl) else (video.url, f"{place}.url")
    options = options.of_part(part, within, field, part.type)
    if not isinstance(url, list):
        _check(url, place, " Send the video itself.")
        return ImageSource(place, url or "", options.of_videos, limits=options.paths)
    if not url or "" in url:
        raise InvalidImageUrl(f"`{place}` {'has an empty URL' if url else 'has no frames'}.", place)
    return ImageSource(place, "", options.of_videos, limits=options.paths, frames=tuple(url))


def _check(url: str | None, field: str, reason: str) -> None:
    """Raise RequestError, with *reason* at its end, if the *url* of *field* is missing or empty."""
    if url is None:
        raise InvalidValue(f"`{field}` is missing.{reason}", field)
    if not url:
        raise InvalidImageUrl(f"`{field}` is empty.{reason}", field)


def _file_source(part: ContentPart, field: str, media_options: MediaOptions) -> ImageSource:
    if part.file is UNSET:
        raise InvalidValue(f"`{field}` is missing.", field)
    file = decode(part.file, _FILE, field)
    if (file.file_id is None) == (file.file_data is None):
        raise InvalidValue(f"`{field}` must have either `file_id` or `file_data`.", field)
    media_options = media_options.of_part(part, file, field.removesuffix(".file"), "file")
    options, limits = media_options.of_images(part.detail or "auto"), media_options.paths
    if file.file_id is not None:
        return ImageSource(f"{field}.file_id", url_of_file(file.file_id), options, limits=limits)
    url = file.file_data or ""
    check_file(url, f"{field}.file_data")
    return ImageSource(f"{field}.file_data", url, options, limits=limits)


def check_file(url: str, field: str) -> None:
    """Raise UnsupportedParameter if *url*, the value of *field*, declares a type other than an image or a PDF."""
    if not url[: max(map(len, FILE_DATA))].lower().startswith(FILE_DATA):
        raise UnsupportedParameter(
            f"`{field}`: files other than images, PDFs and texts are not served; send a data: URL that begins with "
            f"{', '.join(f'`{start}`' for start in FILE_DATA)} or `data:text/`.",
            field,
        )
