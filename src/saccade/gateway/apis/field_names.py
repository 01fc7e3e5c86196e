"""Another API's names of the fields of a ChatRequest, so that errors name the fields that the client sent."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from saccade.errors import RequestError

_NAMED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class FieldNames:
    """*names* maps a field of a ChatRequest, such as `messages[1].content[0]`, to the client's name for it.

    The longest entry that begins a field's path renames it; without an entry a field keeps its name.
    """

    names: Mapping[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        """Return the client's name for the field *name*."""
        end = len(name)
        while end > 0:
            if (client_name := self.names.get(name[:end])) is not None:
                return client_name + name[end:]
            end = max(name.rfind(".", 0, end), name.rfind("[", 0, end))
        return name

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Name the client's fields in the RequestErrors that the block raises."""
        try:
            yield
        except RequestError as error:
            if self.names:
                error.message, error.reason = self._text(error.message), self._text(error.reason)
                error.param = None if error.param is None else self.of(error.param)
            raise

    def _text(self, text: str) -> str:
        return _NAMED.sub(lambda match: f"`{self.of(match[1])}`", text)
