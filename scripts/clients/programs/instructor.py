"""instructor: Pydantic models as answers, by tools and by JSON schema."""

# /// script
# dependencies = ["instructor==1.17.0"]
# ///

from typing import Any

import instructor
import openai
from cards import Card
from questions import CALLER, KEY, MAX_TOKENS, MESSAGES
from results import expect, tell


def by(mode: instructor.Mode) -> None:
    """Ask for a Card in one of instructor's modes, without a second try."""
    plain = openai.OpenAI(base_url=CALLER.url, api_key=KEY, max_retries=0)
    client: Any = instructor.from_openai(plain, mode=mode)
    card = client.chat.completions.create(
        model=CALLER.model, messages=MESSAGES, response_model=Card, max_retries=0, max_tokens=MAX_TOKENS
    )
    expect(isinstance(card, Card), True)


tell(
    "instructor",
    "instructor",
    {
        "a model by a tool": lambda: by(instructor.Mode.TOOLS),
        "a model by a strict tool": lambda: by(instructor.Mode.TOOLS_STRICT),
        "a model by a JSON schema": lambda: by(instructor.Mode.JSON_SCHEMA),
    },
)
