"""The structured answer that programs with Pydantic ask for: bounded, since a random model writes on where it may."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Part(BaseModel):
    """One of the parts of a card."""

    model_config = ConfigDict(extra="forbid")

    shape: Literal["round", "square"]
    count: Annotated[int, Field(ge=0, le=9)]


class Card(BaseModel):
    """A card."""

    model_config = ConfigDict(extra="forbid")

    title: Annotated[str, Field(max_length=8)]
    shape: Literal["round", "square"]
    weight: Annotated[int, Field(ge=0, le=99)] | None
    parts: Annotated[list[Part], Field(max_length=2)]
