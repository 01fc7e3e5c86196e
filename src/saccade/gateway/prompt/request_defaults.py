"""What the operator sets for requests that do not set it: switches of chat templates, limits of images."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade import models
from saccade.errors import RequestError, StartupError
from saccade.gateway.prompt.media_options import NO_OPTIONS, MediaOptions, read_media_options


@dataclass(frozen=True)
class RequestDefaults:
    """*switches* are for models whose template has them; *media* counts for each limit by itself."""

    switches: Mapping[str, Any] = field(default_factory=dict)
    media: MediaOptions = NO_OPTIONS


NO_DEFAULTS = RequestDefaults()


def read_defaults(template_kwargs: str | None, processor_kwargs: str | None) -> RequestDefaults:
    """Return the values of --default-chat-template-kwargs and --mm-processor-kwargs, JSON objects.

    Raises StartupError for a name that no model has, or a wrong value.
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
        return RequestDefaults(switches, read_media_options(json.loads(processor_kwargs or "{}"), None))
    except RequestError as error:
        raise StartupError(f"--mm-processor-kwargs: {error.message}") from error
