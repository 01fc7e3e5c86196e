"""Why a worker gets no requests."""

import msgspec
from fronts import DESCRIPTION

from saccade.gateway.fleet.worker_report import why_excluded
from saccade.gateway.fleet.workers import Fleet
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import EXACT, Exactness


class Described:
    """A worker as far as a fleet looks at it."""

    def __init__(self, url: str, description: Description | None, ready: bool = True, draining: bool = False) -> None:
        self.url = url
        self.description = description
        self.ready = ready and not draining
        self.load = Load(draining=True) if draining else None

    @property
    def exactness(self) -> Exactness:
        return EXACT


def test_every_reason_has_its_words() -> None:
    other = msgspec.structs.replace(DESCRIPTION, fingerprint=b"other".ljust(32))
    expected = {
        Described("unix:/first", DESCRIPTION): "",
        Described("unix:/equal", DESCRIPTION): "",
        Described("unix:/away", DESCRIPTION, ready=False): "it is not ready",
        Described("unix:/new", None): "it is not ready",
        Described("unix:/leaving", DESCRIPTION, draining=True): "it drains",
        Described("unix:/other", other): "it serves another build of its model than the first worker",
        Described("unix:/else", msgspec.structs.replace(other, model="else")): "",
    }
    fleet = Fleet((), lambda _: None)
    for worker in expected:
        fleet.add(worker)  # type: ignore[arg-type]
    assert {worker.url: why_excluded(worker, fleet) for worker in fleet.clients} == {
        worker.url: reason for worker, reason in expected.items()
    }
