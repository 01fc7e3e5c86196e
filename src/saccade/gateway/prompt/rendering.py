"""Renders chats with the model's template, or with the request's own."""

from saccade.gateway.chat import Chat
from saccade.gateway.prompt.sent_texts import check_sent_texts
from saccade.gateway.prompt.tools import texts_in
from saccade.gateway.served_models.served_model import ServedModel
from saccade.tokenization.chat_template import TEXT_FIELDS, ChatTemplate
from saccade.tokenization.tokenizer import Segment


def render(served: ServedModel, chat: Chat) -> list[Segment]:
    """Return the prompt that the template writes for *chat*.

    Raises InvalidValue if the template refuses the chat or leaves out a text of the request.
    """
    template = template_of(served, chat)
    segments = template.render(
        chat.messages, chat.add_generation_prompt, chat.switches, chat.tools, continues=chat.continues
    )
    prompt = "".join(segment.text for segment in segments)
    check_sent_texts(chat.client_messages, prompt, served.declaration.reasoning.end, template.turns.results_first)
    return segments


def template_of(served: ServedModel, chat: Chat) -> ChatTemplate:
    """Return the template that renders *chat*."""
    return chat.template or served.template


def texts_of(chat: Chat) -> list[str]:
    """Return every text of *chat* that the template may write."""
    texts = [switch for switch in chat.switches.values() if isinstance(switch, str)]
    texts += texts_in(chat.tools) if chat.tools else []
    for message in chat.messages:
        texts += [message.get(field, "") for field in TEXT_FIELDS]
        texts += texts_in(message.get("tool_calls", []))
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return texts
