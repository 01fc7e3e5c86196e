"""A trial of each model's files for all the gateways of a test process: a child takes longer than the rest of a start."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import msgspec

from saccade.gateway.served_models import model_registry
from saccade.gateway.served_models.model_probe import ModelProbe
from saccade.protocol.description import ModelFiles


@contextmanager
def shared() -> Iterator[None]:
    """Within it, gateways load files that have passed before without another trial."""
    with patch.object(model_registry, "ModelProbe", TrialOnce):
        yield


class TrialOnce(ModelProbe):
    """A trial whose success is remembered. Files that fail are tried, and refused, each time."""

    passed: frozenset[bytes] = frozenset()

    def __init__(self, name: str, files: ModelFiles) -> None:
        super().__init__(name, files)
        self._key = hashlib.sha256(msgspec.msgpack.encode((name, files))).digest()

    def run_child(self) -> None:
        """Load the files in a child unless they have passed before."""
        if self._key not in TrialOnce.passed:
            super().run_child()
            TrialOnce.passed |= {self._key}
