"""Turns a request's parameters into SamplingParams."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from saccade.errors import ContextLengthExceeded, InvalidValue, UnsupportedParameter
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.field_schemas import BIAS_KEY, NO_BUDGET
from saccade.gateway.served_models.served_model import ServedModel
from saccade.protocol.request import Grammar, SamplingParams, ThinkingBudget

_BIAS_KEY = re.compile(BIAS_KEY)


@dataclass(frozen=True)
class TokenRules:
    """A request's rules for single tokens. All its prompts share them, since there may be many rules and prompts."""

    logit_bias: dict[int, float]
    allowed_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


def token_rules(request: ChatRequest, served: ServedModel) -> TokenRules:
    """Return the token rules of *request*. Raises InvalidValue if a rule names a token that the model does not have."""
    eos_token_ids = () if request.ignore_eos else served.defaults.eos_token_ids
    stop_token_ids = (*eos_token_ids, *_valid_ids("stop_token_ids", request.stop_token_ids or (), served))
    return TokenRules(
        _logit_bias(request, served), _allowed_token_ids(request, served), tuple(dict.fromkeys(stop_token_ids))
    )


def sampling_params(
    request: ChatRequest, served: ServedModel, rules: TokenRules, prompt: Sequence[int], grammar: Grammar | None = None
) -> SamplingParams:
    """Return the sampling parameters for the answer to the token ids *prompt*; the model sets the defaults.

    The answer follows the *rules* of *request* and matches *grammar*. If the prompt ends in reasoning, the grammar
    applies after the reasoning. Raises ContextLengthExceeded if prompt and answer do not fit the context. Raises
    InvalidValue for parameters that contradict each other, and UnsupportedParameter for a thinking budget that the
    model cannot keep.
    """
    defaults = served.defaults
    max_tokens = _max_tokens(request, len(prompt), served)
    top_p = float(_or_default(request.top_p, defaults.top_p))
    temperature = float(_or_default(request.temperature, defaults.temperature))
    return SamplingParams(
        max_tokens=max_tokens,
        # A top_p of 0 leaves only the likeliest token, which a temperature of 0 tells engines.
        temperature=temperature if top_p else 0.0,
        top_p=top_p or 1.0,
        top_k=int(max(_or_default(request.top_k, defaults.top_k), 0)),
        min_p=float(_or_default(request.min_p, defaults.min_p)),
        presence_penalty=float(_or_default(request.presence_penalty, defaults.presence_penalty)),
        frequency_penalty=float(_or_default(request.frequency_penalty, defaults.frequency_penalty)),
        repetition_penalty=float(_or_default(request.repetition_penalty, defaults.repetition_penalty)),
        logit_bias=rules.logit_bias,
        allowed_token_ids=rules.allowed_token_ids,
        seed=request.seed,
        min_tokens=_min_tokens(request, max_tokens),
        stop_token_ids=rules.stop_token_ids,
        num_logprobs=_num_logprobs(request),
        num_prompt_logprobs=request.prompt_logprobs,
        thinking_budget=_thinking_budget(request, served, prompt),
        grammar=None if grammar is None else _after_reasoning(grammar, served, prompt),
    )


def _after_reasoning(grammar: Grammar, served: ServedModel, prompt: Sequence[int]) -> Grammar:
    """Return *grammar* for the answer to the token ids *prompt*.

    If the prompt ends in reasoning, the grammar applies after it; a structural tag stays as it is.
    """
    markers = served.reasoning
    if grammar.kind == "structural_tag" or markers is None or not markers.opened_by(prompt):
        return grammar
    return msgspec.structs.replace(grammar, reasoning_end_id=markers.end_id)


def _thinking_budget(request: ChatRequest, served: ServedModel, prompt: Sequence[int]) -> ThinkingBudget | None:
    """Return the token budget for reasoning in the answer to the token ids *prompt*; None if the request sets none.

    Raises UnsupportedParameter if the model has no reasoning tags or they are not single tokens. Raises InvalidValue if
    the request forbids the end tag.
    """
    num_tokens = request.thinking_token_budget
    if num_tokens in (None, NO_BUDGET):
        return None
    markers = served.reasoning
    if markers is None:
        raise UnsupportedParameter(
            "`thinking_token_budget`: this model's answers have no reasoning; leave it out.", "thinking_token_budget"
        )
    if markers.end_id < 0:
        raise UnsupportedParameter(
            "`thinking_token_budget`: no single token ends this model's reasoning; leave it out.",
            "thinking_token_budget",
        )
    if request.allowed_token_ids and markers.end_id not in request.allowed_token_ids:
        raise InvalidValue(
            f"`allowed_token_ids` needs the token {markers.end_id}, which ends the reasoning after "
            "`thinking_token_budget` tokens.",
            "allowed_token_ids",
        )
    return ThinkingBudget(num_tokens, markers.end_id, None if markers.opened_by(prompt) else markers.start_id)


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _valid_ids(field: str, token_ids: Iterable[int], served: ServedModel) -> tuple[int, ...]:
    """Return *token_ids*, from *field*, without duplicates.

    Raises InvalidValue for an id that the model does not have.
    """
    unique = tuple(dict.fromkeys(token_ids))
    if (largest := max(unique, default=0)) >= served.tokenizer.num_tokens:
        raise InvalidValue(
            f"`{field}` names the token {largest}; this model's tokens end at {served.tokenizer.num_tokens - 1}.",
            field,
        )
    return unique


def _allowed_token_ids(request: ChatRequest, served: ServedModel) -> tuple[int, ...]:
    token_ids = request.allowed_token_ids or ()
    if len(token_ids) > served.tokenizer.num_tokens:
        raise InvalidValue(
            f"`allowed_token_ids` has {len(token_ids)} ids; this model has {served.tokenizer.num_tokens} tokens.",
            "allowed_token_ids",
        )
    return _valid_ids("allowed_token_ids", token_ids, served)


def _logit_bias(request: ChatRequest, served: ServedModel) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        if not _BIAS_KEY.fullmatch(key):
            raise InvalidValue('The keys of `logit_bias` must be token ids, as in {"42": -100}.', "logit_bias")
        biases[int(key)] = bias
    _valid_ids("logit_bias", biases, served)
    return biases


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidValue("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    return None


def _min_tokens(request: ChatRequest, max_tokens: int) -> int:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidValue(f"`min_tokens` is {min_tokens}; the answer has at most {max_tokens} tokens.", "min_tokens")
    return min_tokens


def _max_tokens(request: ChatRequest, num_prompt_tokens: int, served: ServedModel) -> int:
    max_model_len = served.max_model_len
    room = max_model_len - num_prompt_tokens
    limit = request.max_answer_tokens
    if room < 1:
        raise ContextLengthExceeded.of(max_model_len, num_prompt_tokens, request.needed_tokens, "messages")
    if limit is not None and limit > room and not request.clamps_max_tokens:
        field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise ContextLengthExceeded.of(max_model_len, num_prompt_tokens, limit, field)
    return served.defaults.max_tokens(room) if limit is None else min(limit, room)
