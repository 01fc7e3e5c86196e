"""Converts a GenerateRequest from TokenSpeed's wire to an EngineRequest, and refuses unsupported fields by name."""

import re
from collections.abc import Iterator

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade.errors import ContextLengthExceeded, InvalidValue, UnsupportedParameter
from saccade.models.generation_defaults import GenerationDefaults
from saccade.protocol.media import MediaItem
from saccade.protocol.request import MAX_NUM_SAMPLES, EngineRequest, SamplingParams
from saccade.tokenization.detokenizer import TextRules
from saccade.worker.tokenspeed.images import SALT
from saccade.worker.tokenspeed.model import WireModel

NO_PROMPT_LOGPROBS = -1
TOKEN_ID = re.compile("[0-9]{1,10}")


def engine_request(message: pb.GenerateRequest, model: WireModel, request_id: str) -> EngineRequest:
    """Return *message* as a request to the engine. Reads and converts images, which takes milliseconds.

    Raises a RequestError that names the field.
    """
    for field in _unserved(message):
        raise UnsupportedParameter(f"`{field}` is not served by this worker; leave it out.", field)
    token_ids = list(message.tokenized.input_ids)
    if not token_ids:
        raise InvalidValue("`tokenized.input_ids` is empty.", "tokenized.input_ids")
    if message.sampling_params.n > MAX_NUM_SAMPLES:
        raise InvalidValue(f"`sampling_params.n` must be at most {MAX_NUM_SAMPLES}.", "sampling_params.n")
    room = model.description.max_model_len - len(token_ids)
    if room < 1:
        raise ContextLengthExceeded.of(model.description.max_model_len, len(token_ids), 1, "tokenized.input_ids")
    return EngineRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=_sampling(message, model.defaults, room),
        media=tuple(_media(message, model, token_ids)),
        salt=SALT,
        num_samples=message.sampling_params.n or 1,
    )


def text_rules(message: pb.GenerateRequest) -> TextRules | None:
    """Return rules with the strings that end an answer; None without any. Raises InvalidValue for an empty string."""
    sampling = message.sampling_params
    if not sampling.stop:
        return None
    if not all(sampling.stop):
        raise InvalidValue("`sampling_params.stop` has an empty string.", "sampling_params.stop")
    # The search for stop strings reads the text that is shown; the string itself names the reason.
    return TextRules(tuple(sampling.stop), sampling.min_new_tokens, True, not sampling.skip_special_tokens)


def _unserved(message: pb.GenerateRequest) -> Iterator[str]:
    """Yield the names of the fields in *message* that this worker does not serve."""
    sampling = message.sampling_params
    if (constraint := sampling.WhichOneof("constraint")) is not None:
        yield f"sampling_params.{constraint}"
    if sampling.custom_params.fields:
        yield "sampling_params.custom_params"
    if message.HasField("logprob_start_len") and message.logprob_start_len != NO_PROMPT_LOGPROBS:
        yield "logprob_start_len"
    if message.token_ids_logprob:
        yield "token_ids_logprob"
    for name in ("encode_bootstrap_info", "kv_bootstrap_info"):
        if message.HasField(name):
            yield name
    if message.HasField("data_parallel_rank") and message.data_parallel_rank != 0:
        yield "data_parallel_rank"
    if message.top_logprobs_num and not message.return_logprob:
        yield "top_logprobs_num without return_logprob"


def _media(message: pb.GenerateRequest, model: WireModel, token_ids: list[int]) -> Iterator[MediaItem]:
    for index, item in enumerate(message.mm_inputs.items):
        field = f"mm_inputs.items[{index}]"
        if model.images is None:
            raise UnsupportedParameter("This wire has no form for the images of this model.", field)
        yield model.images.read_image(item, token_ids, field)


def _sampling(message: pb.GenerateRequest, defaults: GenerationDefaults, room: int) -> SamplingParams:
    """Return the sampling parameters, with the model's defaults for fields that the message does not set.

    The answer has at most *room* tokens if the message sets no limit.
    """
    params = message.sampling_params

    def number(name: str, default: float) -> float:
        return float(getattr(params, name)) if params.HasField(name) else default

    stop_token_ids = (*(() if params.ignore_eos else defaults.eos_token_ids), *params.stop_token_ids)
    return SamplingParams(
        max_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else defaults.max_tokens(room),
        temperature=number("temperature", float(defaults.temperature)),
        top_p=number("top_p", float(defaults.top_p)),
        top_k=max(0, params.top_k if params.HasField("top_k") else int(defaults.top_k)),
        min_p=number("min_p", float(defaults.min_p)),
        presence_penalty=number("presence_penalty", float(defaults.presence_penalty)),
        frequency_penalty=number("frequency_penalty", float(defaults.frequency_penalty)),
        repetition_penalty=number("repetition_penalty", float(defaults.repetition_penalty)),
        logit_bias={_token_id(key): bias for key, bias in params.logit_bias.items()},
        seed=params.sampling_seed if params.HasField("sampling_seed") else None,
        min_tokens=params.min_new_tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        num_logprobs=message.top_logprobs_num if message.return_logprob else None,
    )


def _token_id(key: str) -> int:
    if not TOKEN_ID.fullmatch(key):
        raise InvalidValue("The keys of `sampling_params.logit_bias` must be token ids.", "sampling_params.logit_bias")
    return int(key)
