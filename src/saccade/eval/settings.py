"""The settings of an evaluation, each with its flag, its default and its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from saccade.config import FLAT, Count, JsonObject, NotNegative, Seconds, Switch

UNSET = Parameter(show_default=False)


@FLAT
@dataclass(frozen=True)
class EvalSettings:
    """How many questions, how often, with which request, and which files have the result."""

    limit: Annotated[Count | None, UNSET] = None
    "Ask this many of the questions, evenly over all; by default all."
    concurrency: Count = 64
    "Questions that wait for their answers at a time."
    runs: Count = 1
    "How often each question is asked. With a --temperature, run N has the seed N."
    thinking: Annotated[bool | None, UNSET] = None
    "Turn reasoning on or off (chat_template_kwargs.enable_thinking); by default the model's template decides."
    cot: Switch = False
    "Let MMMU's questions ask for steps before the answer, with the prompts of MMMU-Pro for this."
    max_tokens: Annotated[Count | None, UNSET] = None
    "The most tokens of an answer; by default 1024, and with --thinking or --cot what the server allows."
    temperature: NotNegative = 0.0
    "The temperature of sampling; 0 takes the most probable token."
    extra_body: Annotated[JsonObject | None, UNSET] = None
    'More fields for every request, such as {"top_p": 0.95}.'
    images: Annotated[Path | None, UNSET] = None
    "The folder of the images that a file names; by default the file's own folder."
    answers: Annotated[Path | None, UNSET] = None
    "The file that keeps the answers (JSONL), by default eval-TASK.jsonl. The same command goes on from there."
    timeout: Seconds = 3600.0
    "Seconds after which a request has failed."
    json: Annotated[Path | None, UNSET] = None
    "Write settings, scores and every answer to this file."
    html: Annotated[Path | None, UNSET] = None
    "Write the scores, and the wrong answers with their images, to this file."
