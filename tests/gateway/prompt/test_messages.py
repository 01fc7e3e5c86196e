"""OpenAI messages become what templates take; what is not served is refused, and the field is named."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidImageUrl, InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.image_source import ImageSource
from saccade.gateway.prompt.media_options import MAX_PIXELS
from saccade.gateway.prompt.messages import MAX_SWITCH, PARTS, read_chat
from saccade.models.family import Family, ImageOptions

FAMILY = Family(("Some",), "<image>", template_switches=("enable_thinking", "add_vision_id"))
TEXT = {"type": "text", "text": "hi"}


def read(messages: list[dict[str, Any]], family: Family = FAMILY, kind: Any = ChatRequest, **fields: Any) -> Chat:
    body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
    return read_chat(msgspec.json.decode(body, type=kind), family)


def user(*parts: Any, **fields: Any) -> Chat:
    return read([{"role": "user", "content": list(parts)}], **fields)


def image(url: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url, **fields}


def options_of(**fields: Any) -> ImageOptions:
    return user(image(), **fields).images[0].options


def refused(error: type[RequestError], param: str, words: str = "", **fields: Any) -> None:
    with pytest.raises(error) as raised:
        read(fields.pop("messages", [{"role": "user", "content": "hi"}]), **fields)
    assert raised.value.param == param
    assert words in raised.value.message
    assert raised.value.message.endswith(".")


def test_text_and_images_keep_their_order() -> None:  # F1
    chat = read(
        [
            {"role": "developer", "content": [image("a"), TEXT]},
            {"role": "user", "content": [TEXT, image({"url": "b"}), image("c"), TEXT], "name": "me"},
            {"role": "assistant", "content": "yes"},
        ]
    )
    text, place = {"type": "text", "text": "hi"}, {"type": "image"}
    assert chat.messages == [
        {"role": "system", "content": [place, text]},
        {"role": "user", "content": [text, place, place, text], "name": "me"},
        {"role": "assistant", "content": "yes"},
    ]
    assert [(source.field, source.url) for source in chat.images] == [
        ("messages[0].content[0].image_url", "a"),
        ("messages[1].content[1].image_url.url", "b"),
        ("messages[1].content[2].image_url", "c"),
    ]


@table(
    ("given", "expected"), [({}, True), ({"add_generation_prompt": None}, True), ({"add_generation_prompt": False}, False)],
)  # fmt: skip
@table("kind", [ChatRequest, TokenizeRequest])
def test_generation_prompt(kind: type, given: dict[str, bool], expected: bool) -> None:
    chat = user(TEXT, kind=kind, **given)
    assert (chat.add_generation_prompt, chat.continues) == (expected, False)


ASKED = {"role": "user", "content": "hi"}
CONTINUED: dict[str, Any] = {
    "text": {"content": "Well"}, "no text": {"content": ""}, "parts": {"content": [image(), TEXT]},
    "reasoning": {"content": None, "reasoning_content": "Hm"},
}  # fmt: skip
NOT_CONTINUED: dict[str, tuple[Any, str]] = {
    "user": ({"role": "user", "content": "a"}, "assistant"),
    "an image": ({"role": "assistant", "content": [image() | {"text": "a"}]}, "text"),
    "no part": ({"role": "assistant", "content": []}, "text"),
    "calls": ({"role": "assistant", "content": "a", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}, "tool_calls"),
}  # fmt: skip


@table("kind", [ChatRequest, TokenizeRequest])
@table("last", CONTINUED)
def test_last_message_that_is_continued(last: str, kind: type) -> None:
    messages = [ASKED, {"role": "assistant", **CONTINUED[last]}]
    for given in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        chat = read(messages, kind=kind, continue_final_message=True, **given)
        assert (chat.add_generation_prompt, chat.continues) == (False, True)
    chat = read(messages, kind=kind, continue_final_message=False)
    assert (chat.add_generation_prompt, chat.continues) == (True, False)


@table("kind", [ChatRequest, TokenizeRequest])
@table("last", NOT_CONTINUED)
def test_last_message_that_cannot_be_continued_is_refused(last: str, kind: type) -> None:
    message, words = NOT_CONTINUED[last]
    refused(
        InvalidValue, "continue_final_message", words, messages=[ASKED, message], kind=kind, continue_final_message=True
    )


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
def test_a_prompt_has_one_end(kind: type) -> None:
    messages = [ASKED, {"role": "assistant", "content": "Well"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(InvalidValue, "continue_final_message", "`add_generation_prompt`", messages=messages, kind=kind, **both)


@table("kind", [ChatRequest, TokenizeRequest])
@table(
    ("given", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"min_pixels": 1, "max_pixels": MAX_PIXELS}, {"min_pixels": 1, "max_pixels": MAX_PIXELS}),
        ({"min_pixels": None, "max_pixels": 7, "size": None}, {"max_pixels": 7}),
        ({"size": {"shortest_edge": 5, "longest_edge": 5}}, {"min_pixels": 5, "max_pixels": 5}),
        ({"size": {"shortest_edge": None, "longest_edge": 9}, "min_pixels": 2}, {"min_pixels": 2, "max_pixels": 9}),
    ],
)
def test_pixel_limits(kind: type, given: Any, expected: dict[str, int]) -> None:
    assert options_of(kind=kind, mm_processor_kwargs=given) == ImageOptions("auto", **expected)


BAD_LIMITS = (0, -1, MAX_PIXELS + 1, 10**30, 1.5, 1e300, True, "9", [9], {})


@table("path", ["min_pixels", "max_pixels", "size.shortest_edge", "size.longest_edge"])
@table("value", BAD_LIMITS)
def test_pixel_limits_have_bounds(path: str, value: Any) -> None:
    *outer, name = path.split(".")
    given = {outer[0]: {name: value}} if outer else {name: value}
    refused(InvalidValue, f"mm_processor_kwargs.{path}", "whole number of pixels", mm_processor_kwargs=given)


@table(
    ("given", "error", "param"),
    [
        ({"do_resize": False}, UnsupportedParameter, "mm_processor_kwargs.do_resize"),
        ({"max_dynamic_patch": None}, UnsupportedParameter, "mm_processor_kwargs.max_dynamic_patch"),
        ({"size": {"height": 5}}, UnsupportedParameter, "mm_processor_kwargs.size.height"),
        ({"x" * 1000: 1}, UnsupportedParameter, "mm_processor_kwargs." + "x" * 64 + "…"),
        ({"size": 5}, InvalidValue, "mm_processor_kwargs.size"),
        ({"size": []}, InvalidValue, "mm_processor_kwargs.size"),
        ({"min_pixels": 5, "size": {"shortest_edge": 5}}, InvalidValue, "mm_processor_kwargs.size.shortest_edge"),
        ({"min_pixels": 6, "max_pixels": 5}, InvalidValue, "mm_processor_kwargs"),
        ({"size": {"shortest_edge": 6, "longest_edge": 5}}, InvalidValue, "mm_processor_kwargs"),
    ],
)
def test_other_processor_settings_are_refused_by_name(given: Any, error: type[RequestError], param: str) -> None:
    refused(error, param, "mm_processor_kwargs", mm_processor_kwargs=given)


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_detail(detail: str) -> None:
    first, second, third = user(
        image({"url": "a", "detail": detail}), image({"url": "b", "detail": None}), image()
    ).images
    assert first.options == ImageOptions(detail)  # type: ignore[arg-type]
    assert second.options == third.options == ImageOptions("auto")


def test_detail_and_limits_together() -> None:
    chat = user(image({"url": "a", "detail": "low"}), image("b"), mm_processor_kwargs={"max_pixels": 9})
    assert [source.options for source in chat.images] == [
        ImageOptions("low", None, 9),
        ImageOptions("auto", None, 9),
    ]


@table("kind", [ChatRequest, TokenizeRequest])
@table("value", [True, False, None, 0, MAX_SWITCH, -0.5, "", "x" * 256])
def test_switches(kind: type, value: Any) -> None:
    given = {"enable_thinking": value, "add_vision_id": True}
    assert user(TEXT, kind=kind, chat_template_kwargs=given).switches == given
    assert user(TEXT, kind=kind).switches == user(TEXT, kind=kind, chat_template_kwargs={}).switches == {}


@table("value", ["x" * 257, MAX_SWITCH + 1, -(10**40), 1e300, [], [1], {}, {"a": 1}])
def test_values_of_switches_are_plain(value: Any) -> None:
    refused(
        InvalidValue, "chat_template_kwargs.enable_thinking", "256", chat_template_kwargs={"enable_thinking": value}
    )


@table("name", ["thinking", "tokenize", "chat_template", "tools", "messages", "add_generation_prompt",
                                  "strftime_now", "bos_token", "__class__", ""])  # fmt: skip
def test_other_switches_are_refused_by_name(name: str) -> None:
    for value in (True, None):
        given = {"enable_thinking": True, name: value}
        refused(UnsupportedParameter, f"chat_template_kwargs.{name}", "`add_vision_id`", chat_template_kwargs=given)


def test_family_without_switches() -> None:
    family = Family(("Other",), "<image>")
    field = "chat_template_kwargs.add_vision_id"
    refused(UnsupportedParameter, field, "has none", family=family, chat_template_kwargs={"add_vision_id": True})
    assert user(TEXT, family=family, chat_template_kwargs={}).switches == {}


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
@pytest.mark.parametrize("switches", [(), ("add_vision_id",)])
def test_thinking_is_accepted_without_a_switch(kind: type, switches: tuple[str, ...]) -> None:
    family = Family(("Other",), "<image>", template_switches=switches)
    for value in (True, False, None):
        chat = user(
            TEXT,
            family=family,
            kind=kind,
            enable_thinking=value,
            reasoning_effort="none",
            chat_template_kwargs={"enable_thinking": value},
        )
        assert chat.switches == {}
    field = "chat_template_kwargs.enable_thinking"
    refused(InvalidValue, field, "256", family=family, chat_template_kwargs={"enable_thinking": [1]})
    effort = user(TEXT, family=family, kind=kind, reasoning_effort="high")
    assert effort.switches == {}
    assert "`reasoning_effort`" in effort.warning


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_parameters_about_reasoning_set_the_templates_switch(switch: str) -> None:
    family = Family(("Some",), "<image>", template_switches=(switch,))

    def switches(**fields: Any) -> Mapping[str, Any]:
        return read([{"role": "user", "content": "hi"}], family, **fields).switches

    assert switches(enable_thinking=False) == {switch: False}
    assert switches(enable_thinking=True) == {switch: True}
    assert switches(reasoning_effort="none", chat_template_kwargs={switch: False}) == {switch: False}
    assert switches(enable_thinking=None, reasoning_effort=None) == {}
    given = {"enable_thinking": True}
    refused(InvalidValue, "enable_thinking", "contradict", family=family, reasoning_effort="none", **given)
    kwargs = {"chat_template_kwargs": {switch: False}}
    refused(InvalidValue, "enable_thinking", "contradict", family=family, **given, **kwargs)
    for effort in ("minimal", "low", "medium", "high", "xhigh"):
        assert switches(reasoning_effort=effort) == {switch: True}
    refused(InvalidValue, "enable_thinking", family=family, reasoning_effort="low", enable_thinking=False)
    refused(InvalidValue, "reasoning_effort", family=family, reasoning_effort="some")


MEDIA = [
    "attachments",
    "audio",
    "file",
    "files",
    "image",
    "image_base64",
    "images",
    "input_image",
    "media",
    "source",
    "video",
]


@table("name", MEDIA)
@table("value", [["aGk="], {"url": "a"}, "data:image/png;base64,aGk=", 1])
def test_media_under_another_name_is_refused(name: str, value: Any) -> None:
    """Dropped, the model would answer that it sees no image."""
    spelling = '{"type": "image_url", "image_url": {"url": '
    in_message = [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi", name: value}]
    if name == "source":  # may say anything of a message
        assert read(in_message) == read([{"role": "user", "content": "hi"}] * 2)
    else:
        refused(UnsupportedParameter, f"messages[1].{name}", spelling, messages=in_message)
    for part in (TEXT, image("a")):
        in_part = [{"role": "user", "content": [TEXT, {**part, name: value}]}]
        refused(UnsupportedParameter, f"messages[0].content[1].{name}", spelling, messages=in_part)


@pytest.mark.parametrize("value", [None, [], {}, "", False])
def test_empty_media_under_another_name_are_nothing(value: Any) -> None:
    empty = dict.fromkeys([*MEDIA, "function_call"], value)
    assert read([{"role": "user", "content": "hi", "image_url": value, **empty}]) == read(
        [{"role": "user", "content": "hi"}]
    )
    assert user({**TEXT, **dict.fromkeys(MEDIA, value)}) == user(TEXT)


def test_an_image_at_the_wrong_place_is_refused() -> None:
    url = {"url": "data:image/png;base64,aGk="}
    message = {"role": "user", "content": "hi", "image_url": url}
    refused(UnsupportedParameter, "messages[0].image_url", "parts of a message", messages=[message])
    message = {"role": "user", "content": [{**TEXT, "image_url": url}]}
    refused(InvalidValue, "messages[0].content[0].image_url", "as a separate part", messages=[message])


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image", "source": {"data": "a"}}, "source"),
        ({"type": "input_image", "image_url": "a"}, "type"),
    ],
)
def test_image_parts_of_other_apis_get_the_openai_spelling(part: dict[str, Any], field: str) -> None:
    messages = [{"role": "user", "content": [part]}]
    refused(UnsupportedParameter, f"messages[0].content[0].{field}", '{"type": "image_url"', messages=messages)


@table(
    ("given", "expected"),
    [
        ({"content": "yes", "reasoning_content": "Hm"}, {"content": "yes", "reasoning_content": "Hm"}),
        ({"content": "yes", "reasoning": "Hm"}, {"content": "yes", "reasoning_content": "Hm"}),
        (
            {"content": "yes", "reasoning": "Hm\n", "reasoning_content": "Hm"},
            {"content": "yes", "reasoning_content": "Hm"},
        ),
        ({"content": "yes", "reasoning_content": ""}, {"content": "yes", "reasoning_content": ""}),
        ({"content": "yes", "reasoning_content": None, "reasoning": None}, {"content": "yes"}),
        ({"content": None, "reasoning_content": "Hm"}, {"content": "", "reasoning_content": "Hm"}),
    ],
)
def test_reasoning_of_earlier_turns(given: dict[str, Any], expected: dict[str, str]) -> None:
    assert read([{"role": "assistant", **given}]).messages == [{"role": "assistant", **expected}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_only_assistants_reason(name: str) -> None:
    message = {"role": "user", "content": "hi"}
    refused(InvalidValue, f"messages[0].{name}", "assistant", messages=[{**message, name: "Hm"}])
    assert read([{**message, name: ""}]).messages == [message]


@pytest.mark.parametrize("kind", ["input_audio", "audio_url", "image_embeds"])
def test_parts_that_come_later_are_refused_by_name(kind: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [TEXT, {"type": kind, kind: {}}]}]
    refused(UnsupportedParameter, "messages[1].content[1].type", f"`{kind}`", messages=messages)


def test_unknown_parts_are_not_echoed() -> None:
    part = {"type": "secret"}
    with pytest.raises(UnsupportedParameter) as raised:
        user(part)
    assert "secret" not in raised.value.message
    assert "those of `text`, `image_url`, `video_url`, `image`, `video`, `file` are" in raised.value.message


@pytest.mark.parametrize("kind", PARTS)
def test_parts_that_a_refusal_offers_are_served(kind: str) -> None:
    refused(InvalidValue, f"messages[0].content[0].{kind}", messages=[{"role": "user", "content": [{"type": kind}]}])


def test_uuid_beside_an_image_changes_nothing() -> None:
    with_uuid, without = user(image({"url": "a"}, uuid="x")), user(image({"url": "a"}))
    assert with_uuid == without
    assert with_uuid.images == [ImageSource("messages[0].content[0].image_url.url", "a", ImageOptions())]


@pytest.mark.parametrize(
    ("part", "error", "field"),
    [
        (image(None), InvalidValue, "image_url"),
        (image(""), InvalidImageUrl, "image_url"),
        (image({"url": ""}), InvalidImageUrl, "image_url.url"),
    ],
)
def test_uuid_cannot_stand_for_an_image(part: dict[str, Any], error: type[RequestError], field: str) -> None:
    for given, words in ((part, field), ({**part, "uuid": "x"}, "uuid")):
        messages = [{"role": "user", "content": [given]}]
        refused(error, f"messages[0].content[0].{field}", words, messages=messages)
