"""Checks, by characters and by tokens, whether a prompt can fit the context."""

from dataclasses import replace

from saccade.errors import ContextLengthExceeded
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.prompt.media_options import NO_DEFAULTS, RequestDefaults
from saccade.gateway.prompt.messages import read_chat
from saccade.gateway.prompt.rendering import render, template_of, texts_of
from saccade.gateway.prompt.tools import place_result_images
from saccade.gateway.prompt.turns import rewrite_turns
from saccade.gateway.served_models.served_model import ServedModel

MAX_UTF8_BYTES = 4
"""Bytes of a character, at most."""


def read_chat_that_may_fit(
    request: ChatRequest | TokenizeRequest, served: ServedModel, defaults: RequestDefaults = NO_DEFAULTS
) -> Chat:
    """Return the chat in *request*, with its turns in a form that the template writes.

    A template may leave out text, such as the reasoning of earlier turns. So a chat with too much text is rendered, and
    the rendered text decides. Raises RequestError, such as ContextLengthExceeded if the text cannot fit.
    """
    chat = read_chat(request, served.declaration, defaults)
    if request.chat_template is not None:
        chat = replace(chat, template=served.template.replaced_by(request.chat_template))
    template = template_of(served, chat)
    turns, warning = rewrite_turns(chat.messages, template.turns)
    warning = "; ".join(filter(None, (chat.warning, warning)))
    chat = replace(chat, messages=place_result_images(turns, template), client_messages=chat.messages, warning=warning)
    texts = list(texts_of(chat))
    if sum(map(len, texts)) * MAX_UTF8_BYTES <= served.max_model_len:
        return chat
    bound = served.tokenizer.text_bound
    if bound.least_tokens("".join(texts)) <= served.max_model_len:
        return chat
    segments = render(served, chat)
    rendered = "".join(segment.text for segment in segments if not segment.is_special)
    if (least := bound.least_tokens(rendered)) > served.max_model_len:
        raise ContextLengthExceeded.of(served.max_model_len, least, num_completion(request), "messages", at_least=True)
    return chat


def check_context(num_prompt_tokens: int, request: ChatRequest | TokenizeRequest, served: ServedModel) -> None:
    """Raise ContextLengthExceeded if the prompt does not fit even without an answer."""
    if num_prompt_tokens > served.max_model_len:
        completion = num_completion(request)
        raise ContextLengthExceeded.of(served.max_model_len, num_prompt_tokens, completion, "messages")


def num_completion(request: ChatRequest | TokenizeRequest) -> int:
    """Return how many tokens *request* needs for its answer."""
    return request.needed_tokens if isinstance(request, ChatRequest) else 0
