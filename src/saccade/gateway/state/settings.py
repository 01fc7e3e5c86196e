"""The settings of the gateway's database."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter, Token

from saccade.config import FLAT, GIB, Count, LocalPath, Switch
from saccade.errors import StartupError

POSTGRES: Final = ("postgresql://", "postgres://")
"""The beginnings of a URL of PostgreSQL."""


def _location(_: Any, tokens: Sequence[Token]) -> str | None:
    location = tokens[0].value
    if location == "none":
        return None
    if location.startswith(POSTGRES):
        return location
    return str(Path(location).expanduser().absolute())


@FLAT
@dataclass(frozen=True)
class StateSettings:
    """Where the gateway keeps files and responses, and how much of them. By default they stay in memory."""

    location: Annotated[str | None, Parameter(name="--state", converter=_location, metavar="FOLDER|URL")] = field(
        default=None, repr=False
    )
    "Keep files and responses in this folder or at this postgresql:// URL, over restarts; none keeps them in memory."
    key_file: Annotated[LocalPath | None, Parameter(name="--state-key-file")] = None
    "The secret key of --state, by default a file in its folder; it is made if it is missing."
    is_encrypted: Annotated[Switch, Parameter(name="--state-encrypt")] = False
    "Encrypt what --state keeps; needs the extra `encryption`."
    max_bytes: Annotated[Count, Parameter(name="--state-bytes")] = 8 * GIB
    "Bytes that all tenants may keep in --state together."
    max_tenant_bytes: Annotated[Count, Parameter(name="--state-tenant-bytes")] = GIB
    "Bytes that one tenant may keep in --state."
    response_seconds: Annotated[Count, Parameter(name="--response-store-seconds")] = 30 * 24 * 3600
    "Seconds that --state keeps a conversation after its last turn."

    def __bool__(self) -> bool:
        return self.location is not None

    @property
    def is_postgres(self) -> bool:
        """Whether *location* is a URL of PostgreSQL."""
        return self.location is not None and self.location.startswith(POSTGRES)

    def __post_init__(self) -> None:
        """Raise StartupError if the database needs a key file."""
        if self.is_postgres and self.key_file is None:
            raise StartupError(
                "--state postgresql://... needs --state-key-file: a file of which each of its gateways has a copy. The "
                "first gateway makes it."
            )


NO_STATE: Final = StateSettings()
