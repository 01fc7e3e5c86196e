"""What a gateway knows about a worker at one moment, including how its wire differs from others."""

import copy
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from saccade.errors import RequestError, UnsupportedParameter
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import NOTHING, Exactness
from saccade.protocol.needs import NO_NEED, Need

Refusals = Mapping[Need, RequestError]
"""The needs that a worker cannot serve, each with the error for a request that has it."""

NO_REFUSALS: Refusals = MappingProxyType({})
NO_GRAMMARS = UnsupportedParameter("This model's workers enforce no grammars.", "response_format")
CHATS_ONLY = UnsupportedParameter("This model's workers take chats only.", "messages")

ANOTHER_TENANT = (
    "An SGLang worker serves one API key and one value of `cache_salt`, the first that asked, because it cannot keep "
    "the caches of several apart. Send the request with those; for several, the operator must run other workers, such "
    "as vLLM's."
)


@dataclass(frozen=True)
class WorkerState:
    """A worker, or one of its data-parallel ranks, as it is now."""

    description: Description | None = None
    """Its last description of itself."""
    ready: bool = False
    """Whether it can take a request."""
    loss: str = ""
    """Why it is not connected, for operators; "" if it is, or has not been tried yet."""
    load: Load | None = None
    """Its last report of its load."""
    load_times: tuple[float, float] = (0.0, 0.0)
    """Two times of the monotonic clock, in seconds; *load* was true at some time between them."""
    exactness: Exactness = NOTHING
    """How exact the index of its caches can be once all its events have arrived."""
    refusals: Refusals = field(default_factory=dict)
    salt: bytes | None = None
    """Of the only tenant that it serves; None if it keeps tenants apart, or has had no request yet."""
    reports_images: bool = False
    """Whether its events report encoder outputs, so that the pixels of these images need not be sent."""
    kept_image_bytes: int = 0
    """Of the images that it gets, as many bytes are believed to stay there; 0 if it reports images or keeps none."""

    @property
    def takes_chats(self) -> bool:
        """Whether it gets requests as chats, because it takes no token ids."""
        return Need.TOKEN_IDS in self.refusals

    @property
    def lacks(self) -> Need:
        """The needs that it cannot serve."""
        return functools.reduce(operator.or_, self.refusals, NO_NEED)

    def refusal(self, needs: Need, salt: bytes, errors: Refusals = NO_REFUSALS) -> RequestError | None:
        """Return why it cannot serve a request of the tenant with *salt* that has *needs*, or None if it can.

        Of a need in *errors*, that error is the reason.
        """
        for need, error in self.refusals.items():
            if need in needs:
                # Whoever raises an error writes to it.
                return copy.copy(errors.get(need, error))
        return None if self.salt in (None, salt) else RequestError(ANOTHER_TENANT)


def refusals_of(description: Description) -> Refusals:
    """Return the needs that a worker with *description* does not serve by its own word."""
    served = {
        Need.ENFORCED_GRAMMAR: (description.takes_grammars, NO_GRAMMARS),
        Need.THINKING_BUDGET: (description.takes_thinking_budgets, not_served("thinking_token_budget")),
    }
    return {need: error for need, (is_served, error) in served.items() if not is_served}


def not_served(name: str) -> UnsupportedParameter:
    """Return the error for parameter *name*, which a wire cannot express."""
    return UnsupportedParameter(f"`{name}` is not served by this model's workers; leave it out.", name)
