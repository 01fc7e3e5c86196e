"""From a request's parameters to SamplingParams."""

from saccade.errors import ContextLengthExceeded
from saccade.gateway.openai import ChatRequest
from saccade.gateway.served_model import ServedModel
from saccade.protocol.request import SamplingParams


def sampling_params(request: ChatRequest, served: ServedModel, num_prompt_tokens: int) -> SamplingParams:
    """Return how to draw the answer; the model's own defaults hold where the request says nothing.

    Raises ContextLengthExceeded where prompt and answer do not fit the context.
    """
    defaults = served.defaults
    top_k = _given(request.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=_max_tokens(request, num_prompt_tokens, served.max_model_len),
        temperature=float(_given(request.temperature, defaults.temperature)),
        top_p=float(_given(request.top_p, defaults.top_p)),
        top_k=int(max(top_k, 0)),
        seed=request.seed,
        stop_token_ids=() if request.ignore_eos else defaults.eos_token_ids,
    )


def stop_strings(request: ChatRequest) -> tuple[str, ...]:
    """Return the strings that end the answer."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: ChatRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens, which leaves no room for an answer in this model's context "
            f"of {max_model_len}.",
            "messages",
        )
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if asked is not None and asked > room:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens and `{field}` asks for {asked}; this model's context holds "
            f"{max_model_len} in all.",
            field,
        )
    return room if asked is None else asked
