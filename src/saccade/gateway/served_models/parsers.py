"""The parsers of answers that an operator may choose."""

from dataclasses import dataclass
from typing import Final

from saccade.models.family import Family, ReasoningParser, ToolParser


@dataclass(frozen=True)
class Parsers:
    """The parsers of answers; "auto" is the one that the model's family declares, "none" parses nothing.

    The other names of *reasoning* are vLLM's parsers for the markers that "auto" looks for.
    """

    tool_calls: ToolParser = "auto"
    reasoning: ReasoningParser = "auto"

    @property
    def reads_reasoning(self) -> bool:
        return self.reasoning != "none"

    def tool_format(self, family: Family) -> str | None:
        """Return the format of calls that is parsed in answers of a model of *family*, None for none."""
        if self.tool_calls == "auto":
            return family.tool_format
        return None if self.tool_calls == "none" else self.tool_calls


DECLARED: Final = Parsers()
