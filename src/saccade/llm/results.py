"""What chats from Python return: a result for a whole answer, deltas for a streamed one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from saccade.errors import SaccadeError
from saccade.gateway.apis.chat import AnswerMessage, ChatCompletion, Choice, ToolCall
from saccade.gateway.chat import CalledFunction
from saccade.gateway.output.answer import Usage
from saccade.gateway.output.choice import Chunk


@dataclass(frozen=True)
class ChatResult:
    """The answer to one conversation, or the *error* that it failed with.

    *completion* is what the API would return: *choices* with an answer for each of `n`, *usage*, log probabilities. The
    other properties are those of the first choice. If there is an error, they raise it. *seconds* and *ttft_seconds*
    count from the call to the end of the answer and to its first token.
    """

    seconds: float
    ttft_seconds: float | None = None
    completion: ChatCompletion | None = None
    error: SaccadeError | None = None

    @property
    def choices(self) -> Sequence[Choice]:
        """Every answer, in the format of OpenAI's API; none if there is an error."""
        return () if self.completion is None else self.completion.choices

    @property
    def usage(self) -> Usage | None:
        """Tokens of the prompt, of these those that were cached, and of the answers; the sizes of images."""
        return None if self.completion is None else self.completion.usage

    @property
    def message(self) -> AnswerMessage:
        """The answer as a message, which may be appended to the conversation."""
        return self._first.message

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self.message.content or ""

    @property
    def reasoning(self) -> str:
        """The reasoning before the text."""
        reasoning = self.message.reasoning_content
        return "" if reasoning is UNSET else reasoning

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The calls of tools: each has an *id*, and a *function* with *name* and *arguments*, JSON as text."""
        calls = self.message.tool_calls
        return () if calls is UNSET else calls

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: "stop", "length" or "tool_calls"."""
        return self._first.finish_reason

    @property
    def parsed(self) -> Any:
        """The JSON in the text as a value. Raises ValueError if it is not JSON; `max_tokens` may have cut it."""
        return json.loads(self.text)

    @property
    def _first(self) -> Choice:
        if self.error is not None:
            raise self.error
        return self.choices[0]


@dataclass(frozen=True)
class Delta:
    """What a stream adds to the choice *index*. The last delta has the *usage*, and nothing else."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    index: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None

    @classmethod
    def of(cls, chunk: Chunk) -> "Delta":
        calls = [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in chunk.calls]
        return cls(chunk.content, chunk.reasoning, calls, chunk.choice.index, chunk.choice.finish_reason)
