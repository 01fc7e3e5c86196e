"""Whether a prompt fits the context: first by the bytes of its text, before anything is fetched or tokenised."""

from saccade.errors import ContextLengthExceeded
from saccade.gateway.messages import Chat, read_chat
from saccade.gateway.openai_requests import ChatRequest, TokenizeRequest
from saccade.gateway.sampling import answer_tokens
from saccade.gateway.served_model import ServedModel

MAX_UTF8_BYTES = 4
"""Of a character."""


def read_chat_that_may_fit(request: ChatRequest | TokenizeRequest, served: ServedModel) -> Chat:
    """Return the chat in *request*. Raises RequestError, among them ContextLengthExceeded for text that cannot fit.

    A template may leave text out, such as what the model thought in earlier turns. A chat with too much text is
    therefore rendered, and what the template wrote decides.
    """
    chat = read_chat(request, served.declaration)
    texts = list(_texts(chat))
    if sum(map(len, texts)) * MAX_UTF8_BYTES <= served.max_model_len:
        return chat
    bound = served.tokenizer.text_bound
    if bound.least_tokens("".join(texts)) <= served.max_model_len:
        return chat
    segments = served.template.render(chat.messages, chat.add_generation_prompt, chat.switches)
    written = "".join(segment.text for segment in segments if not segment.is_special)
    if (least := bound.least_tokens(written)) > served.max_model_len:
        raise ContextLengthExceeded.of(served.max_model_len, least, _num_completion(request), "messages", at_least=True)
    return chat


def check_context(num_prompt_tokens: int, request: ChatRequest | TokenizeRequest, served: ServedModel) -> None:
    """Raise ContextLengthExceeded for a prompt that does not fit even without an answer."""
    if num_prompt_tokens > served.max_model_len:
        completion = _num_completion(request)
        raise ContextLengthExceeded.of(served.max_model_len, num_prompt_tokens, completion, "messages")


def _texts(chat: Chat) -> list[str]:
    texts = []
    for message in chat.messages:
        texts += [message.get("name", ""), message.get("reasoning_content", "")]
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return texts


def _num_completion(request: ChatRequest | TokenizeRequest) -> int:
    return (answer_tokens(request) or 1) if isinstance(request, ChatRequest) else 0
