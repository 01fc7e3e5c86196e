"""RequestTraits: what decides whether a worker can serve a request, before a worker is chosen."""

from dataclasses import dataclass

from saccade.errors import RequestError
from saccade.protocol.request import EngineRequest, SamplingParams


@dataclass(frozen=True)
class RequestTraits:
    """A request for *num_samples* answers to *num_tokens* tokens, of the tenant with *salt*.

    *sampling* None stands for defaults. *needs_token_ids* says why a worker that takes only chats cannot serve the
    request; None if it can.
    """

    num_tokens: int
    sampling: SamplingParams | None = None
    num_samples: int = 1
    has_images: bool = False
    salt: bytes = b""
    needs_token_ids: RequestError | None = None

    @classmethod
    def of(cls, request: EngineRequest) -> "RequestTraits":
        """Return the traits of *request*, which goes as token ids."""
        return cls(len(request.token_ids), request.sampling, request.num_samples, bool(request.media), request.salt)
