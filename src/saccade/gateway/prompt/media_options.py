"""Options for images and videos.

A request sets them for all its media with vLLM's `mm_processor_kwargs` and `media_io_kwargs`. A part of a message sets
them for itself, and the operator sets the defaults.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final

import msgspec

from saccade import models
from saccade.errors import InvalidValue, RequestError, StartupError, UnsupportedParameter
from saccade.gateway.json_body import decode
from saccade.gateway.media_parameters import ImageLimits, limits_of
from saccade.models.family import NO_TIMES, Detail, Family, FrameTimes, ImageOptions, VideoOptions

MAX_PIXELS = 2**31
MAX_FRAMES = 2**20
MAX_FPS = 1000
MAX_SIDE = 2**15
MAX_SHOWN_CHARACTERS = 64
"""A longer name from a request is cut in errors."""

NOT_SET = -1
"""vLLM's value of `num_frames` and `fps` that leaves them to the model."""

_SIZE_KEYS: Final = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""The reference processors' names of these limits, which also count pixels (smart_resize)."""

_SAMPLING_KEYS: Final = ("num_frames", "fps")
_SIDES: Final = ("resized_height", "resized_width")
_FRAMES: Final = ("min_frames", "max_frames")
_VIDEO_KEYS: Final = (*_SAMPLING_KEYS, "frames_indices", "total_num_frames")

OF_VIDEOS: Final = "media_io_kwargs.video"
_SOFT_TOKENS: Final = "max_soft_tokens"
OF_ALL: Final = "mm_processor_kwargs"
_LIMITS: Final = {
    **dict.fromkeys(("min_pixels", "max_pixels"), (MAX_PIXELS, "pixels")),
    **dict.fromkeys(_SIDES, (MAX_SIDE, "pixels")),
    _SOFT_TOKENS: (MAX_PIXELS, "tokens"),
}
"""Limits of images and videos: the most, and the unit."""

_VIDEO_LIMITS: Final = {"total_pixels": (MAX_PIXELS, "pixels"), **dict.fromkeys(_FRAMES, (MAX_FRAMES, "frames"))}
_ALIASES: Final = {"nframes": "num_frames", "sample_fps": "fps"}
"""Names of qwen-vl-utils in parts."""

MAX_LIMIT_BYTES: Final = 64
_ANY: Final = msgspec.json.Decoder()


@dataclass(frozen=True)
class MediaOptions:
    """How to limit and sample a request's images and videos."""

    limits: Mapping[str, int] = field(default_factory=dict)
    """Those of `min_pixels`, `max_pixels`, `max_soft_tokens` and the resized sides that are set."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`num_frames` or `fps`."""
    times: FrameTimes = NO_TIMES
    """For frames that the client has sampled."""
    video_limits: Mapping[str, int] = field(default_factory=dict)
    """`min_frames`, `max_frames` and `total_pixels`."""
    paths: tuple[str, ...] = ()
    """The places of limits that stand in one part of a message."""
    of_frame: frozenset[str] = frozenset()
    """Limits of pixels that hold for each frame of a video, as qwen-vl-utils reads them."""

    def of_images(self, detail: Detail = "auto") -> ImageOptions:
        """Return the options for an image with *detail*."""
        return ImageOptions(detail, **self.limits)

    @property
    def of_videos(self) -> VideoOptions:
        """The options for the request's videos."""
        settings = {**self.limits, **self.video_limits, **self.sampling}
        return VideoOptions(times=self.times, of_frame=self.of_frame, **settings)

    def of_part(self, part: ImageLimits, within: ImageLimits | None, field: str, key: str) -> "MediaOptions":
        """Return the options for the image or video in *part*, the value of *field*.

        The part's own limits override these. Some limits may be *within* the object at *key*. Raises an InvalidValue
        that names the limit.
        """
        stated = {f"{field}.{name}": raw for name, raw in limits_of(part).items()}
        if within is not None:
            stated |= {f"{field}.{key}.{name}": raw for name, raw in limits_of(within).items()}
        if not stated:
            return self
        values = [(path, path.rpartition(".")[2], _small(raw, path)) for path, raw in stated.items()]
        named = [(path, _ALIASES.get(name, name), value) for path, name, value in values]
        limits = {**self.limits, **_whole_limits(named, _LIMITS)}
        video_limits = {**self.video_limits, **_whole_limits(named, _VIDEO_LIMITS)}
        _check_together({**limits, **video_limits}, field)
        sampling = _read_sampling({path: value for path, name, value in named if name in _SAMPLING_KEYS})
        times = replace(self.times, fps=sampling["fps"]) if "fps" in sampling else self.times
        of_frame = frozenset(name for _, name, _ in named if name in ("min_pixels", "max_pixels"))
        return MediaOptions(limits, sampling or self.sampling, times, video_limits, tuple(stated), of_frame)

    def served_by(self, family: Family, *, is_from_request: bool) -> "MediaOptions":
        """Return the options for *family*, without the token limits that it does not support.

        Raises UnsupportedParameter or InvalidValue if the request set such a limit.
        """
        budget, budgets = self.limits.get(_SOFT_TOKENS), family.soft_token_budgets
        if budget is None or budget in budgets:
            return self
        path = f"{OF_ALL}.{_SOFT_TOKENS}"
        if is_from_request and budgets:
            raise InvalidValue(f"`{path}` must be one of {', '.join(map(str, budgets))}.", path)
        if is_from_request:
            raise UnsupportedParameter(f"`{path}` is not served for this model; `max_pixels` is.", path)
        return replace(self, limits={key: value for key, value in self.limits.items() if key != _SOFT_TOKENS})


NO_OPTIONS = MediaOptions()


def read_media_options(
    processor: Mapping[str, Any] | None, media_io: Mapping[str, Any] | None, defaults: MediaOptions = NO_OPTIONS
) -> MediaOptions:
    """Return the options in *processor* and *media_io*; *defaults* fill the gaps.

    Raises a RequestError that names the field.
    """
    processor, videos = processor or {}, _read_media_io(media_io or {})
    sampling = {
        f"{name}.{key}": values.get(key)
        for name, values in ((OF_ALL, processor), (OF_VIDEOS, videos))
        for key in _SAMPLING_KEYS
    }
    named = _limits_in(processor)
    limits = {**defaults.limits, **_whole_limits(named, _LIMITS)}
    video_limits = {**defaults.video_limits, **_whole_limits(named, _VIDEO_LIMITS)}
    ours = "".join(f"; this server's `{name}` is {value}" for name, value in defaults.limits.items())
    _check_together({**limits, **video_limits}, OF_ALL, ours)
    read = _read_sampling(sampling)
    times = FrameTimes(
        _indices(videos.get("frames_indices") or [], f"{OF_VIDEOS}.frames_indices"),
        None
        if (total := videos.get("total_num_frames")) is None
        else _num_frames(total, f"{OF_VIDEOS}.total_num_frames"),
        read.get("fps") if videos.get("fps") is not None else None,
    )
    return MediaOptions(limits, read or defaults.sampling, times, video_limits)


def _read_media_io(media_io: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings for videos. Raises RequestError for any other settings."""
    for kind, settings in media_io.items():
        name = f"media_io_kwargs.{excerpt(kind)}"
        if kind not in ("image", "video"):
            raise UnsupportedParameter(f"`{name}` is not served; `video` is.", name)
        if not isinstance(settings, dict | None):
            raise InvalidValue(f"`{name}` must be an object.", name)
        for key in settings or ():
            if kind == "image" or key not in _VIDEO_KEYS:
                path, ours = f"{name}.{excerpt(key)}", ", ".join(f"`video.{key}`" for key in _VIDEO_KEYS)
                raise UnsupportedParameter(f"`{path}` is not served; {ours} are.", path)
    return media_io.get("video") or {}


def _read_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `num_frames` or `fps`, whichever is set at one of the paths in *settings*."""
    sampling = {path: value for path, value in settings.items() if value is not None and value != NOT_SET}
    for path, value in sampling.items():
        if not path.endswith("fps"):
            sampling[path] = _num_frames(value, path)
        elif type(value) not in (int, float) or not isfinite(value) or not 0 < value <= MAX_FPS:
            raise InvalidValue(f"`{path}` must be a number of frames a second, over 0 and at most {MAX_FPS}.", path)
    if len(sampling) > 1:
        raise InvalidValue(
            f"{' and '.join(f'`{path}`' for path in sampling)} both choose the frames of videos; send one.",
            next(iter(sampling)),
        )
    names = {path: path.rpartition(".")[2] for path in sampling}
    return {_ALIASES.get(names[path], names[path]): value for path, value in sampling.items()}


def _num_frames(value: object, path: str) -> int:
    if (number := _whole(value, 1, MAX_FRAMES)) is None:
        raise InvalidValue(f"`{path}` must be a whole number of frames, from 1 to {MAX_FRAMES}.", path)
    return number


def _indices(value: object, path: str) -> tuple[int, ...]:
    indices = [_whole(index, 0, MAX_FRAMES - 1) for index in value] if isinstance(value, list) else [None]
    if None in indices:
        raise InvalidValue(f"`{path}` must be a list of whole numbers from 0 to {MAX_FRAMES - 1}.", path)
    return tuple(index for index in indices if index is not None)


def _whole(value: object, least: int, most: int) -> int | None:
    """Return *value* as an integer if it is a whole number within bounds, such as 4 or 4.0; None otherwise."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    return number if type(number) is int and least <= number <= most else None


def _small(raw: msgspec.Raw, path: str) -> object:
    """Return the number in *raw*. A value that is too long for a number stays bytes, which no limit accepts."""
    content = bytes(memoryview(raw)[: MAX_LIMIT_BYTES + 1])
    return decode(raw, _ANY, path) if len(content) <= MAX_LIMIT_BYTES else content


def _whole_limits(named: Sequence[tuple[str, str, object]], bounds: Mapping[str, tuple[int, str]]) -> dict[str, int]:
    """Return the limits among *named*, triples of (path in the request, name, value), that *bounds* lists.

    Raises InvalidValue.
    """
    limits: dict[str, int] = {}
    for path, name, value in named:
        if name not in bounds:
            continue
        most, unit = bounds[name]
        if (limit := _whole(value, 1, most)) is None:
            raise InvalidValue(f"`{path}` must be a whole number of {unit}, from 1 to {most}.", path)
        if name in limits:
            raise InvalidValue(f"`{path}` is `{name}` by another name; send one of the two.", path)
        limits[name] = limit
    return limits


def _check_together(limits: Mapping[str, int], field: str, ours: str = "") -> None:
    """Raise InvalidValue if the *limits* in *field* contradict each other; *ours* describes the operator's settings."""
    for least, most in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        if limits.get(least, 0) > limits.get(most, MAX_PIXELS):
            raise InvalidValue(f"`{field}`: `{least}` must not be over `{most}`{ours}.", field)
    if len(missing := [side for side in _SIDES if side not in limits]) == 1:
        raise InvalidValue(f"`{field}`: `{missing[0]}` is missing; the sides of an image are set together.", field)


def _limits_in(settings: Mapping[str, Any]) -> list[tuple[str, str, object]]:
    """Return (path in the request, limit's name, value) for every limit in *settings* that is not null."""
    limits: list[tuple[str, str, Any]] = []
    known = {**_LIMITS, **_VIDEO_LIMITS}
    for key, value in settings.items():
        if key in known:
            limits.append((f"{OF_ALL}.{key}", key, value))
        elif key in _SAMPLING_KEYS:
            continue
        elif key != "size":
            raise _unknown_key(key, ", ".join(f"`{name}`" for name in (*known, *_SAMPLING_KEYS)) + " and `size`")
        elif not isinstance(value, dict | None):
            raise InvalidValue(f"`{OF_ALL}.size` must be an object.", f"{OF_ALL}.size")
        else:
            for edge, limit in (value or {}).items():
                if edge not in _SIZE_KEYS:
                    raise _unknown_key(f"size.{edge}", "`size.shortest_edge` and `size.longest_edge`")
                limits.append((f"{OF_ALL}.size.{edge}", _SIZE_KEYS[edge], limit))
    return [limit for limit in limits if limit[2] is not None]


def _unknown_key(key: str, alternatives: str) -> UnsupportedParameter:
    path = f"{OF_ALL}.{excerpt(key)}"
    return UnsupportedParameter(f"`{path}` is not served; {alternatives} are.", path)


def excerpt(name: str) -> str:
    """Return a client's *name* for an error, shortened if it is long."""
    return name if len(name) <= MAX_SHOWN_CHARACTERS else name[:MAX_SHOWN_CHARACTERS] + "…"


@dataclass(frozen=True)
class RequestDefaults:
    """The operator's defaults for requests.

    *switches* apply to models whose template has them. Each limit in *media* applies unless the request sets it.
    """

    switches: Mapping[str, Any] = field(default_factory=dict)
    media: MediaOptions = NO_OPTIONS


NO_DEFAULTS = RequestDefaults()


def default_image_options(processor_kwargs: str | None, family: Family) -> ImageOptions:
    """Return an image's options at a gateway with these --mm-processor-kwargs, if its request sets none.

    Raises StartupError.
    """
    return read_defaults(None, processor_kwargs).media.served_by(family, is_from_request=False).of_images()


def read_defaults(
    template_kwargs: str | None, processor_kwargs: str | None, media_io_kwargs: str | None = None
) -> RequestDefaults:
    """Parse --default-chat-template-kwargs, --mm-processor-kwargs and --media-io-kwargs, which are JSON objects.

    Raises StartupError for a name that no model has, or for a wrong value.
    """
    switches = json.loads(template_kwargs or "{}")
    known = sorted({switch for family in models.families().values() for switch in family.template_switches})
    if unknown := [name for name in switches if name not in known]:
        raise StartupError(
            f"--default-chat-template-kwargs: no model has the switch {unknown[0]}; known: {', '.join(known)}."
        )
    if any(not isinstance(value, str | int | float | None) for value in switches.values()):
        raise StartupError("--default-chat-template-kwargs: values must be true, false, null, numbers or strings.")
    try:
        media = read_media_options(json.loads(processor_kwargs or "{}"), json.loads(media_io_kwargs or "{}"))
    except RequestError as error:
        flag = "--media-io-kwargs" if (error.param or "").startswith("media_io_kwargs") else "--mm-processor-kwargs"
        raise StartupError(f"{flag}: {error.message}") from error
    if media.times.indices or media.times.num_frames is not None:
        raise StartupError("--media-io-kwargs: the places of frames are those of one video; only requests have them.")
    # The rate is that of frames to draw, not of frames that a client has drawn.
    return RequestDefaults(switches, replace(media, times=NO_TIMES))
