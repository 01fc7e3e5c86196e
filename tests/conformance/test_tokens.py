"""Every release's token ids against its reference, one by one; and users' text that would be more. A4 E1 E3 E4 F1 F2"""

import itertools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conversations import (
    CONVERSATIONS,
    FORGERIES,
    IMAGE,
    SPECIALS,
    Conversation,
    call,
    forged_tools,
    result,
    text,
    turn,
    user,
)
from jinja2 import TemplateError
from PIL import Image
from references import Seen
from references.native import load
from subjects import SUBJECTS, Sides, Subject

from saccade import models
from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.prompt.placeholders import expand, write_images
from saccade.gateway.prompt.tools import check_history, place_result_images
from saccade.gateway.served_models.served_model import ServedModel
from saccade.models.files import read_model_files, video_processor
from saccade.models.tool_formats import FORMATS
from saccade.tokenization.tokenizer import Segment

Both = Callable[[str], Sides]
Served = Callable[[str], ServedModel]
NAMES = tuple(subject.checkpoint for subject in SUBJECTS)
SIZES = ((150, 100), (90, 230), (640, 480))


def asked_of(subject: Subject) -> list[str]:
    """The chats that make sense for a release: one without a switch is not told to think, or given tools."""
    return [
        name
        for name, chat in CONVERSATIONS.items()
        if (chat.thinking is None or subject.thinking is not None) and (not chat.tools or subject.takes_tools)
    ]


CASES = [(subject.checkpoint, chat) for subject in SUBJECTS for chat in asked_of(subject)]
EVERYDAY = {
    "plain", "empty", "system and turns", "parts", "interleaved without spaces", "images in every turn",
    "longer run of spaces", "combining marks", "Chinese mixed", "emoji", "near specials", "thinking off with images",
    "thinking on", "reasoning of old", "reasoning last", "no generation prompt", *(name for name, chat in CONVERSATIONS.items() if chat.tools),
}  # fmt: skip
EVERYDAY_FORGERIES = {"everything at once", "beside images", "over two parts", "by everybody"}


def each(cases: Iterable[tuple[str, str]], everyday: Collection[str]) -> list[Any]:
    """The cases as parameters; only those of the *everyday* run outside `make conformance`."""
    return [pytest.param(*case, marks=() if case[1] in everyday else pytest.mark.conformance) for case in cases]


@pytest.fixture(scope="module")
def served(sides: Both) -> Served:
    """What a gateway makes of a release's files."""
    return cache(lambda name: ServedModel.from_files(name, read_model_files(sides(name).folder), 0))


@pytest.fixture(scope="module")
def reference_seen(sides: Both) -> Callable[[str], list[Seen]]:
    """What the reference makes of an image of each of SIZES."""
    return cache(lambda name: [sides(name).reference.see(Image.new("RGB", size)) for size in SIZES])


def switches(subject: Subject, chat: Conversation) -> dict[str, bool]:
    """What the request tells the template."""
    return {} if chat.thinking is None or subject.thinking is None else {subject.thinking: chat.thinking}


def rendered(model: ServedModel, subject: Subject, chat: Conversation) -> list[Segment]:
    """The prompt in segments."""
    return model.template.render(chat.messages, chat.add_generation_prompt, switches(subject, chat), chat.tools)


def expanded(model: ServedModel, segments: Sequence[Segment], num_images: int) -> list[int]:
    """The ids that a worker gets when images have SIZES, in turn."""
    sizes = itertools.islice(itertools.cycle(SIZES), num_images)
    layouts = [model.layout.image(*size, model.layout.settings) for size in sizes]
    written = write_images(segments, model.tokenizer.special_tokens, model.placeholders, layouts)
    encoded = model.tokenizer.encode(written)
    token_ids, spans = expand(encoded, model.placeholders, layouts)
    assert [sum(span.length for span in one) for one in spans] == [layout.num_tokens for layout in layouts]
    return token_ids


def told_of_tools(both: Sides, chat: Conversation) -> dict[str, Any]:
    """The variables that the release's code makes of tools. Kimi-K2.5's are tested in models/test_kimi_k25_tools.py."""
    form = models.families()[both.family].tool_format
    made = None if form is None else FORMATS[form].variables
    if not chat.tools:
        return {}
    return {"tools": list(chat.tools)} if made is None else dict(made(chat.tools))


def reference_prompt(both: Sides, chat: Conversation) -> str:
    """The prompt as transformers renders it."""
    tools = told_of_tools(both, chat)
    return both.reference.render(chat.messages, chat.add_generation_prompt, switches(both.subject, chat) | tools)


def expected(both: Sides, chat: Conversation, seen: Sequence[Seen]) -> list[int]:
    """The reference's ids."""
    prompt = reference_prompt(both, chat)
    return both.reference.token_ids(prompt, list(itertools.islice(itertools.cycle(seen), chat.num_images)))


def special_ids(both: Sides) -> set[int]:
    """The ids that tokenizer_config.json calls special; nothing that a user types may become one."""
    entries = json.loads((both.folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    return {int(number) for number, entry in entries.items() if entry["special"]}


def harmless(content: Any) -> Any:
    """The same content with other words."""
    return "x" if isinstance(content, str) else [part if part == IMAGE else part | {"text": "x"} for part in content]


def test_there_are_enough_chats() -> None:
    assert min(len(asked_of(subject)) for subject in SUBJECTS) >= 40
    assert set(CONVERSATIONS) >= EVERYDAY
    assert set(FORGERIES) >= EVERYDAY_FORGERIES


@pytest.mark.aspect("ids")
@pytest.mark.parametrize(("name", "chat"), each(CASES, EVERYDAY))
def test_ids_equal_the_reference(
    name: str, chat: str, sides: Both, served: Served, reference_seen: Callable[[str], list[Seen]]
) -> None:  # A4 E1 E3 E4
    both, model, asked = sides(name), served(name), CONVERSATIONS[chat]
    ours = expanded(model, rendered(model, both.subject, asked), asked.num_images)
    assert ours == expected(both, asked, reference_seen(name))


ENDINGS: dict[str, tuple[str, ...]] = {
    "text": ("The answer is",), "a space": ("The answer is ",), "a line break": ("  The answer:\n",), "nothing": ("",),
    "parts": ("One. ", "Two"), "a tag": ("<think>\nI am",), "typed specials": ("a <|im_end|>",),
}  # fmt: skip
"""Last messages to go on with."""
CONTINUED = [
    (subject.checkpoint, chat, ending) for subject in SUBJECTS for chat in asked_of(subject) for ending in ENDINGS
]
EVERYDAY_CONTINUED = {"turns", "images in every turn", "reasoning of old, thinking off", "a call and its result"}


@pytest.mark.aspect("ids")
@pytest.mark.parametrize(
    ("name", "chat", "ending"),
    [pytest.param(*case, marks=() if case[1] in EVERYDAY_CONTINUED else pytest.mark.conformance) for case in CONTINUED],
)
def test_continued_message_ends_as_in_the_reference(
    name: str, chat: str, ending: str, sides: Both, served: Served
) -> None:  # E1 E4
    """The prompt has the same bytes, and ends behind the last message's text. What transformers refuses is refused."""
    both, model, begun = sides(name), served(name), CONVERSATIONS[chat]
    said = ENDINGS[ending]
    messages = [*begun.messages, turn("assistant", *(said if len(said) == 1 else map(text, said)))]
    told = switches(both.subject, begun)
    tools = told_of_tools(both, begun)
    try:
        expected = both.reference.render(messages, False, told | tools | {"continue_final_message": True})
    except TemplateError:
        with pytest.raises(InvalidValue, match="template"):
            model.template.render(messages, False, told, begun.tools, continues=True)
        assert begun.messages[-1]["role"] == "assistant", "some templates refuse two turns of one role"
        return
    except ValueError:
        with pytest.raises(InvalidValue, match="leaves out"):
            model.template.render(messages, False, told, begun.tools, continues=True)
        assert ending == "parts", "some templates write the first text of a turn alone"
        return
    segments = model.template.render(messages, False, told, begun.tools, continues=True)
    assert "".join(segment.text for segment in segments) == expected
    assert expected.rstrip().endswith(said[-1].strip())
    assert not said[-1] or not segments[-1].is_special


@pytest.mark.aspect("ids")
@pytest.mark.parametrize(("name", "forgery"), each(itertools.product(NAMES, FORGERIES), EVERYDAY_FORGERIES))
def test_typed_special_tokens_stay_text(
    name: str, forgery: str, sides: Both, served: Served, reference_seen: Callable[[str], list[Seen]]
) -> None:  # F1 F2
    """The special ids are those of the same chat in harmless words, and no character of the prompt is lost."""
    both, model, chat = sides(name), served(name), Conversation(FORGERIES[forgery])
    segments = rendered(model, both.subject, chat)
    twin = Conversation([{**turn, "content": harmless(turn["content"])} for turn in chat.messages])
    special = special_ids(both)
    ours = expanded(model, segments, chat.num_images)
    reference = expected(both, twin, reference_seen(name))
    assert [number for number in ours if number in special] == [number for number in reference if number in special]
    prompt = both.reference.render(chat.messages, chat.add_generation_prompt, {})
    assert "".join(segment.text for segment in segments) == prompt
    assert_decodes_to(both, model, segments)


WITH_TOOLS = [subject.checkpoint for subject in SUBJECTS if subject.takes_tools]
TAGS = "<think></think><tool_call></tool_call><tool_response>\n</tool_response><|tool_calls_section_begin|>"
CALLS = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"


@pytest.mark.aspect("ids")
@pytest.mark.parametrize("typed", [TAGS, CALLS, "".join(SPECIALS)], ids=["tags", "calls", "specials"])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_special_tokens_in_tools_stay_text(name: str, typed: str, sides: Both, served: Served) -> None:  # F1 F2
    """Declarations, calls and results make no special token and no tag, as no other text of users does."""
    both, model = sides(name), served(name)
    segments = rendered(model, both.subject, forged_tools(typed))
    harmless_ids = model.tokenizer.encode(rendered(model, both.subject, forged_tools("x")))
    special = set(model.tokenizer.special_tokens.values())
    ours = model.tokenizer.encode(segments)
    assert [number for number in ours if number in special] == [n for n in harmless_ids if n in special]
    assert special & {model.tokenizer.token_id(tag) for tag in (model.declaration.reasoning.begin, "<|open|>")}
    assert "".join(segment.text for segment in segments) == reference_prompt(both, forged_tools(typed))


@pytest.mark.aspect("ids")
@pytest.mark.parametrize("chat", [name for name, chat in CONVERSATIONS.items() if chat.tools])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_prompts_with_tools_equal_the_reference(name: str, chat: str, sides: Both, served: Served) -> None:  # F13
    both, asked = sides(name), CONVERSATIONS[chat]
    segments = rendered(served(name), both.subject, asked)
    assert "".join(segment.text for segment in segments) == reference_prompt(both, asked)


@pytest.mark.parametrize("name", NAMES)
def test_templates_write_calls_and_results_or_are_listed_as_losing_them(name: str, sides: Both, served: Served) -> None:
    both, template = sides(name), served(name).template  # F13
    asked = [user("a"), turn("assistant", "b") | {"tool_calls": [call(0, "f", a="31415")]}]
    answered = [*asked, result(call(0, "f"), "27182")]
    for loses, messages, written in (
        (template.loses_calls, asked, "31415"),
        (template.loses_results, answered, "27182"),
    ):
        try:
            prompt = both.reference.render(messages, True, {})
        except TemplateError:
            prompt = written  # what a template refuses is not lost
        assert loses == (written not in prompt)


@pytest.mark.parametrize("name", NAMES)
def test_images_of_results_have_room_or_are_refused(
    name: str, sides: Both, served: Served, reference_seen: Callable[[str], list[Seen]]
) -> None:  # F13
    """In the result if the template writes them there, else in the next turn of the user."""
    both, model = sides(name), served(name)
    messages = [
        user(IMAGE, text("Zoom.")),
        turn("assistant", "") | {"tool_calls": [call(0, "crop", side="left")]},
        result(call(0, "crop"), text("Here:"), IMAGE),
        user("So?"),
    ]
    if model.template.loses_calls or model.template.loses_results:
        with pytest.raises(UnsupportedParameter):
            check_history(messages, model.template)
        return
    check_history(messages, model.template)
    placed = Conversation(place_result_images(messages, model.template))
    ours = expanded(model, rendered(model, both.subject, placed), 2)
    assert ours == expected(both, placed, reference_seen(name))


@pytest.mark.parametrize("name", NAMES)
def test_templates_with_and_without_tools(name: str, sides: Both, served: Served) -> None:
    assert served(name).template.takes_tools == sides(name).subject.takes_tools


NOT_SAVED = {"kimi_k25", "kimi_k3", "phi3_v", "smolvlm2"}
"""The processors of three are written again for the tests, and the fourth needs a package for videos."""


def save_processor(both: Sides, folder: Path) -> None:
    """Write the processor as transformers saves it, beside the network's config.json."""
    load(both.folder, "AutoProcessor").save_pretrained(folder)
    shutil.copy(both.folder / "config.json", folder)


@pytest.mark.conformance
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_SAVED])
def test_a_saved_processor_makes_the_same_prompts(name: str, sides: Both, served: Served, tmp_path: Path) -> None:  # A1
    """transformers writes the settings of images and videos into one file, and the template into another."""
    both, before = sides(name), served(name)
    save_processor(both, tmp_path)
    after = ServedModel.from_files(name, read_model_files(tmp_path), 0)
    assert not (tmp_path / "preprocessor_config.json").exists()
    assert after.layout.settings == before.layout.settings
    assert (after.videos is None) == (before.videos is None)
    if after.videos is not None and before.videos is not None and video_processor(read_model_files(both.folder)):
        assert after.videos.layout.settings == before.videos.layout.settings
    for chat in (CONVERSATIONS[name] for name in asked_of(both.subject) if name in EVERYDAY):
        ours, theirs = (
            expanded(model, rendered(model, both.subject, chat), chat.num_images) for model in (after, before)
        )
        assert ours == theirs


def assert_decodes_to(both: Sides, model: ServedModel, segments: Sequence[Segment]) -> None:
    """The ids' text is the prompt's: to the last space where the tokenizer keeps spaces, and without its own BOS."""
    text = "".join(segment.text for segment in segments)
    token_ids = model.tokenizer.encode(segments)
    if both.subject.is_lossless:
        assert model.tokenizer.decode(token_ids) == text
    else:
        shown = model.tokenizer.decode([number for number in token_ids if number not in special_ids(both)])
        spoken = "".join(segment.text for segment in segments if not segment.is_special)
        assert "".join(shown.split()) == "".join(spoken.split())
