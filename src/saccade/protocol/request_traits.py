"""RequestTraits: what decides whether a worker can serve a request, before a worker is chosen."""

from dataclasses import dataclass

from saccade.errors import RequestError
from saccade.protocol.request import EngineRequest, SamplingParams


@dataclass(frozen=True)
class RequestTraits:
    """What decides whether a worker can serve a request."""

    num_tokens: int
    """Of the prompt."""
    sampling: SamplingParams | None = None
    """None for defaults."""
    num_samples: int = 1
    """Answers."""
    has_images: bool = False
    salt: bytes = b""
    """The tenant's."""
    needs_token_ids: RequestError | None = None
    """Why a worker that takes only chats cannot serve it; None if it can."""

    @classmethod
    def of_request(cls, request: EngineRequest) -> "RequestTraits":
        """Return the traits of *request*, which goes as token ids."""
        return cls(len(request.token_ids), request.sampling, request.num_samples, bool(request.media), request.salt)
