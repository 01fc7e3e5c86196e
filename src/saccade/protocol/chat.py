"""ChatPrompt: a prompt as a chat, for workers that take no token ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ChatPrompt:
    """A request's messages, as chat templates take them, and its images, encoded as they arrived.

    - images: entry i belongs to the i-th part that is not text, like media[i] of the EngineRequest.
    - switches: the template's variables that the request sets.
    """

    messages: tuple[Mapping[str, Any], ...]
    images: tuple[bytes, ...]
    switches: Mapping[str, Any]
