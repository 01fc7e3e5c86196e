"""Makes the bodies of vLLM's requests: /inference/v1/generate for token ids, /v1/chat/completions for chats.

The contract is vllm/entrypoints/scale_out/token_in_token_out/protocol.py and openai/chat_completion/protocol.py of
vLLM 0.32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pybase64

from saccade.connectors.events.named_images import cache_salt, media_identifier
from saccade.connectors.vllm import media as vllm_media
from saccade.connectors.vllm.media import ImageForm
from saccade.connectors.worker_state import not_served
from saccade.errors import ImageTooLarge, InternalError, UnsupportedParameter
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.transport import wire

MAX_TOP_LOGPROBS = 20
"""vLLM's default for --max-logprobs."""

SEEDS = 1 << 63
WHOLE: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def generate_body(request: EngineRequest, model: str, form: ImageForm | None) -> bytes:
    """Return the body that sends *request* as token ids. Images are inline, or only their identifiers are sent.

    The time is proportional to the pixels. Raises UnsupportedParameter for what the wire lacks, and ImageTooLarge for
    more pixels than a request may have.
    """
    _check_parameters(request)
    body = {
        **WHOLE,
        "request_id": request.request_id,
        "model": model,
        "token_ids": request.token_ids,
        "sampling_params": {
            **_sampling(request.sampling),
            "n": request.num_samples,
            "logprobs": _num_logprobs(request.sampling),
            "detokenize": False,
        },
        "cache_salt": cache_salt(request.salt),
        **_priority(request),
    }
    if request.sampling.grammar is not None:
        body["sampling_params"]["structured_outputs"] = {"structural_tag": request.sampling.grammar.text}
        # The tag covers the reasoning: the worker must not wait for its end.
        body["reasoning_ended"] = True
    if request.media:
        if form is None:
            raise UnsupportedParameter("This model's workers take no images.", "messages")
        body["features"] = _features(request, form)
    return msgspec.json.encode(body)


def chat_body(request: EngineRequest, model: str, chat: ChatPrompt) -> bytes:
    """Return the body that sends *request* as *chat*. The time is proportional to the images.

    Each image has its identifier, so that the worker names it as it does with token ids. Raises UnsupportedParameter
    and ImageTooLarge as generate_body() does.
    """
    _check_parameters(request)
    _check_bytes(sum(map(len, chat.images)))
    sampling = request.sampling
    body = {
        **WHOLE,
        "request_id": request.request_id,
        "model": model,
        "messages": list(_messages(request, chat)),
        **_sampling(sampling),
        "n": request.num_samples,
        "logprobs": sampling.num_logprobs is not None,
        "top_logprobs": _num_logprobs(sampling),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "chat_template_kwargs": dict(chat.switches),
        "cache_salt": cache_salt(request.salt),
        **_priority(request),
    }
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def _check_parameters(request: EngineRequest) -> None:
    """Raise UnsupportedParameter for what vLLM does not stream."""
    if request.sampling.num_prompt_logprobs is not None:
        raise not_served("prompt_logprobs")


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return all sampling parameters, so that no default of the worker applies.

    Our stop_token_ids hold the end-of-sequence ids unless they are to be ignored, so the worker adds none.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in sampling.logit_bias.items()} or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "seed": None if sampling.seed is None else sampling.seed % SEEDS,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
    }


def _priority(request: EngineRequest) -> Mapping[str, int]:
    """Return the request's priority; a worker without --scheduling-policy priority refuses any but 0."""
    return {"priority": request.priority} if request.priority else {}


def _num_logprobs(sampling: SamplingParams) -> int | None:
    """Return how many log probabilities to ask for: one more, because vLLM counts the drawn token among them."""
    requested = sampling.num_logprobs
    return requested and min(requested + 1, max(requested, MAX_TOP_LOGPROBS))


def _features(request: EngineRequest, form: ImageForm) -> dict[str, Any]:
    items = request.media
    _check_bytes(sum(len(item.inline or b"") for item in items))
    if any(len(item.spans) != 1 for item in items):
        raise UnsupportedParameter("The images of this model cannot be sent to this worker as token ids.", "messages")
    data = [None if item.inline is None else _quoted(vllm_media.encoded(form, item)) for item in items]
    places = [{"offset": item.spans[0].start, "length": item.spans[0].length} for item in items]
    return {
        "mm_hashes": {form.modality: [media_identifier(request.salt, item.content_hash) for item in items]},
        "mm_placeholders": {form.modality: places},
        "kwargs_data": {form.modality: data},
    }


def _messages(request: EngineRequest, chat: ChatPrompt) -> Sequence[Mapping[str, Any]]:
    """Return the chat's messages with its images as data: URLs, in the order of their parts."""
    pending = iter(zip(chat.images, request.media, strict=True))
    messages = []
    for message in chat.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [part if part["type"] == "text" else _image(request.salt, *next(pending)) for part in content]
        # vLLM's name of this key is `reasoning`; older templates read `reasoning_content`.
        reasoning = message.get("reasoning_content")
        messages.append({**message, "content": content, **({"reasoning": reasoning} if reasoning is not None else {})})
    if next(pending, None) is not None:
        raise InternalError("A chat shows fewer images than it was prepared with.")
    return messages


def _image(salt: bytes, encoded: bytes, item: Any) -> dict[str, Any]:
    url = _quoted(b"data:application/octet-stream;base64," + pybase64.b64encode(encoded))
    return {"type": "image_url", "image_url": {"url": url}, "uuid": media_identifier(salt, item.content_hash)}


def _quoted(text: bytes) -> msgspec.Raw:
    """Return base64 as a JSON string, without a search for characters to escape."""
    return msgspec.Raw(b'"' + text + b'"')


def _check_bytes(num_bytes: int) -> None:
    if num_bytes > wire.MAX_MESSAGE_BYTES:
        raise ImageTooLarge(
            f"The request's images come to {num_bytes} bytes; at most {wire.MAX_MESSAGE_BYTES} can be sent to this "
            "worker. Send fewer or smaller ones.",
            "messages",
        )
