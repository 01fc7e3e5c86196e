"""From a ChatRequest to the parts that the pipeline answers: the model, the chat, and the grammar of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from saccade.gateway.chat import Chat, ChatRequest, PlainPrompt
from saccade.gateway.prompt.draft import PromptDrafter, is_long
from saccade.gateway.request import Request
from saccade.gateway.served_models.model_registry import ModelRegistry
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.structured_output.constraint import (
    Constraint,
    read_constraint,
    with_calls,
    without_constraint,
)
from saccade.gateway.structured_output.grammars import AnswerGrammar, RequestGrammars
from saccade.gateway.tenants.account import request_salt


@dataclass(frozen=True)
class Part:
    """One prompt of a request. *params* has no messages, so that images are dropped as soon as they are decoded.

    *salt* separates its caches from those of other tenants. The answer must match *answer_grammar*.
    """

    params: ChatRequest
    chat: Chat
    served: ServedModel
    salt: bytes
    answer_grammar: AnswerGrammar | None = None


@dataclass(frozen=True)
class BegunReading:
    """A request whose reading has begun; a short chat is read already."""

    params: ChatRequest
    prompts: Sequence[PlainPrompt]
    constraint: Constraint | None
    served: ServedModel
    chat: Chat | None


@dataclass(frozen=True)
class PartReader:
    """Reads requests: over HTTP or from Python, a chat, or several plain prompts that share its parameters."""

    model_registry: ModelRegistry
    prompts: PromptDrafter
    grammars: RequestGrammars

    def begin(self, request: ChatRequest, prompts: Sequence[PlainPrompt] = ()) -> BegunReading:
        """Read what takes little time, in the caller's turn. Raises SaccadeError."""
        constraint = read_constraint(request)
        params = without_constraint(request)
        served = self.model_registry.get(params.model)
        chat = None if prompts or is_long(params) else self.prompts.read(served, params)
        return BegunReading(params, prompts, constraint, served, chat)

    async def finish(self, begun: BegunReading, request: Request) -> list[Part]:
        """Return the part of each prompt, and keep of the memory of *request* only the chat's. Raises SaccadeError."""
        params, served, constraint = begun.params, begun.served, begun.constraint
        if begun.chat is not None:
            chats = [begun.chat]
        elif begun.prompts:
            chats = [await self.prompts.read_plain(served, params, prompt) for prompt in begun.prompts]
        else:
            chats = [await self.prompts.read_long(served, params)]
        tokens = served.tool_calls if chats[0].plain is None else None
        constraint = with_calls(constraint, params, chats[0].tools, tokens)
        params = msgspec.structs.replace(params, messages=[])
        del begun  # and with it the messages
        request.keep_chat()
        salt, answer_grammar = request_salt(request.tenant.salt, params.cache_salt), None
        if constraint is not None:
            answer_grammar = await self.grammars.of(constraint, salt, request.client, request.tenant.priority)
        return [Part(params, chat, served, salt, answer_grammar) for chat in chats]
