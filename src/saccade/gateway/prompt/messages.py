"""Turns OpenAI messages into a Chat: messages for a chat template, image sources, and template switches."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import UNSET, Raw

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatMessage, ChatRequest, ContentPart, OtherMedia, TokenizeRequest
from saccade.gateway.field_schemas import EFFORTS, IMAGE_PART, VIDEO_PART
from saccade.gateway.image_source import ImageSource
from saccade.gateway.json_body import parse
from saccade.gateway.media_parameters import MediaLimits
from saccade.gateway.prompt.media_options import NO_DEFAULTS, MediaOptions, RequestDefaults, excerpt, read_media_options
from saccade.gateway.prompt.media_parts import image_source, video_source
from saccade.gateway.prompt.tools import CallRule, read_calls, read_choice, read_tools, texts_in
from saccade.models.family import Family
from saccade.tokenization.messages import Message

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Clients' roles, and their names in templates."""

PARTS: Final = ("text", "image_url", "video_url", "image", "video", "file")
REFUSED_PARTS: Final = ("input_audio", "audio_url", "image_embeds")
"""Types of parts in OpenAI's and vLLM's APIs that a refusal names; other types are arbitrary text."""

MEDIA_OF_PARTS: Final = ("text", "image_url", "video_url", "image", "video", "file")
MEDIA_FIELDS: Final = {
    "image_url": ("image_url", "image", IMAGE_PART),
    "video_url": ("video_url", "video", VIDEO_PART),
}
"""Media fields of parts: the type of part that each belongs to, the kind of media, and how to send it."""

ALL_MEDIA: Final = ("image_url", "video_url", "image", "video", "file")
MEDIA_IN_MESSAGES: Final = (*OtherMedia.__struct_fields__, "file", "image_url", "video_url")
MEDIA_IN_PARTS: Final = (
    *(name for name in OtherMedia.__struct_fields__ if name not in MediaLimits.__struct_fields__),
    *("file", "inline_data", "source"),
)
"""Names of media in other APIs. In a message `image_url` is one of them, and `source` may be anything."""

TEXT_ONLY: Final = "this model reads text only; send the request to a model that takes images, or leave the image out."

THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template switches that turn reasoning on and off."""

NO_SWITCH: Final = "has no effect: this model's chat template does not turn reasoning on and off"
VERBOSITY: Final = "`verbosity` has no effect: chat templates know no verbosity"

PART_CHARACTERS = 32
"""A message or a part of one takes at least as long as this many characters."""

MAX_EMPTY_BYTES = 16
MAX_SWITCH = 2**31
MAX_SWITCH_CHARACTERS = 256


def read_chat(request: ChatRequest | TokenizeRequest, family: Family, defaults: RequestDefaults = NO_DEFAULTS) -> Chat:
    """Return the chat in *request* for a model of *family*. Raises a RequestError that names the field."""
    options = defaults.media
    if request.mm_processor_kwargs or request.media_io_kwargs:
        options = read_media_options(request.mm_processor_kwargs, request.media_io_kwargs, options)
    if options.limits:
        sets_tokens = (request.mm_processor_kwargs or {}).get("max_soft_tokens") is not None
        options = options.served_by(family, is_from_request=sets_tokens)
    images: list[ImageSource] = []
    messages = [
        _read_message(message, f"messages[{position}]", options, images)
        for position, message in enumerate(request.messages or ())
    ]
    if images and not family.takes_images:
        raise UnsupportedParameter(f"`{images[0].field}`: {TEXT_ONLY}", images[0].field)
    switches = {name: value for name, value in defaults.switches.items() if name in family.template_switches}
    switches |= _read_switches(request.chat_template_kwargs, family.template_switches)
    switches |= _thinking(request, family.template_switches)
    if "tool_choice" in family.template_switches and read_choice(request) == CallRule(must_call=True):
        switches["tool_choice"] = "required"
    continues = _continues(request)
    add_generation_prompt = request.add_generation_prompt is not False and not continues
    tools = read_tools(request)
    warning = _unobeyed(request, family.template_switches)
    size = num_characters(request)
    return Chat(messages, size, images, add_generation_prompt, switches, tools, continues, warning=warning)


def num_characters(request: ChatRequest | TokenizeRequest) -> int:
    """Return the number of characters in *request*'s messages and tools, a measure of the work that they cause."""
    return sum(map(_num_characters, request.messages or ())) + sum(map(len, texts_in(request.tools)))


def _num_characters(message: ChatMessage) -> int:
    texts = (message.name, message.tool_call_id, message.reasoning_content or message.reasoning, message.refusal)
    num_characters = PART_CHARACTERS + sum(len(text or "") for text in texts)
    for call in message.tool_calls or ():
        num_characters += len(call.id) + len(call.function.name) + len(call.function.arguments) + PART_CHARACTERS
    if isinstance(message.content, str):
        return num_characters + len(message.content)
    return num_characters + sum(
        len(part.text or part.refusal or "") + PART_CHARACTERS for part in message.content or ()
    )


def _continues(request: ChatRequest | TokenizeRequest) -> bool:
    """Return whether the answer continues the last message. Raises InvalidValue if that message cannot be continued."""
    if not request.continue_final_message:
        return False
    last = request.messages[-1] if request.messages else None
    if request.add_generation_prompt:
        reason = "and `add_generation_prompt` contradict each other; send one of them"
    elif last is None or last.role != "assistant":
        reason = "needs a last message of the role assistant"
    elif last.tool_calls:
        reason = "goes on with the text of the last message, which its `tool_calls` would follow; leave them out"
    elif isinstance(last.content, list) and not last.refusal and all(p.type in ALL_MEDIA for p in last.content):
        reason = "needs a text in the last message's `content`"
    else:
        return True
    raise InvalidValue(f"`continue_final_message` {reason}.", "continue_final_message")


def _read_message(message: ChatMessage, field: str, options: MediaOptions, images: list[ImageSource]) -> Message:
    _refuse_other_media(message, field)
    call = message.function_call
    if message.role == "function" or (call is not UNSET and _holds_something(call)):
        raise UnsupportedParameter(
            f"`{field}`: messages of the role function and `function_call` are not read here; OpenAI's newer form is "
            "`tool_calls`, answered by messages of the role tool.",
            field,
        )
    if message.role not in ROLES:
        raise InvalidValue(f"`{field}.role` must be one of {', '.join(ROLES)}.", f"{field}.role")
    read: dict[str, Any] = {"role": ROLES[message.role]}
    if calls := read_calls(message, field):
        read["tool_calls"] = calls
    if message.role == "tool":
        if message.tool_call_id is None:
            raise InvalidValue(
                f"`{field}.tool_call_id` is missing; it is the `id` of the call that the message answers.",
                f"{field}.tool_call_id",
            )
        read["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id:
        raise InvalidValue(
            f"`{field}.tool_call_id`: only messages of the role tool answer a call; leave it out here.",
            f"{field}.tool_call_id",
        )
    named: Literal["reasoning", "reasoning_content"]
    named = "reasoning" if message.reasoning_content is None else "reasoning_content"
    if message.reasoning and message.reasoning_content and not _are_alike(message):
        raise InvalidValue(
            f"`{field}.reasoning` and `{field}.reasoning_content` differ; send one of them.", f"{field}.reasoning"
        )
    if (reasoning := _of_assistant(named, message, field)) is not None:
        read["reasoning_content"] = reasoning
    if message.name is not None:
        read["name"] = message.name
    return {**read, "content": _content(message, field, options, images)}


def _are_alike(message: ChatMessage) -> bool:
    return (message.reasoning or "").strip() == (message.reasoning_content or "").strip()


def _content(
    message: ChatMessage, field: str, options: MediaOptions, images: list[ImageSource]
) -> str | list[dict[str, str]]:
    """Return a turn's content; a refusal becomes text after it.

    An answer has no content if it only calls tools, was cut off within its reasoning, or is empty. Clients send such
    answers back.
    """
    refusal = _of_assistant("refusal", message, field) or ""
    match message.content:
        case str(text):
            return text + refusal
        case list(parts) if parts or message.role != "assistant":
            named = ((f"{field}.content[{index}]", part) for index, part in enumerate(parts))
            read = [_read_part(part, name, options, images) for name, part in named]
            return [*read, {"type": "text", "text": refusal}] if refusal else read
    if message.role != "assistant":
        raise InvalidValue(f"`{field}.content` is missing.", f"{field}.content")
    return refusal


def _of_assistant(
    name: Literal["refusal", "reasoning", "reasoning_content"], message: ChatMessage, field: str
) -> str | None:
    """Return the text of the field *name*, which only assistants' turns may have.

    Raises InvalidValue for other roles.
    """
    text: str | None = getattr(message, name)
    if message.role == "assistant":
        return text
    if text:
        what = "a refusal" if name == "refusal" else "reasoning"
        raise InvalidValue(
            f"`{field}.{name}`: only messages of the role assistant hold {what}; leave it out here.", f"{field}.{name}"
        )
    return None


def _read_part(part: ContentPart, field: str, options: MediaOptions, images: list[ImageSource]) -> dict[str, str]:
    if part.type in MEDIA_OF_PARTS:
        _refuse_other_media(part, field)
    for name, (of_type, what, example) in MEDIA_FIELDS.items():
        if getattr(part, name) and part.type in MEDIA_OF_PARTS and part.type != of_type:
            raise InvalidValue(
                f"`{field}` is a part of type `{part.type}`, which holds no {what}; send {example} as a separate part.",
                f"{field}.{name}",
            )
    match part:
        case ContentPart(type="text", text=str(text)) | ContentPart(type="refusal", refusal=str(text)):
            return {"type": "text", "text": text}
        case ContentPart(type="text" | "refusal" as name):
            raise InvalidValue(f"`{field}.{name}` is missing.", f"{field}.{name}")
        case ContentPart(type="image_url" | "image" | "file"):
            images.append(image_source(part, field, options))
            return {"type": "image"}
        case ContentPart(type="video_url" | "video"):
            images.append(video_source(part, field, options))
            return {"type": "video"}
        case _:
            named = f"`{part.type}`" if part.type in REFUSED_PARTS else "this type"
            kinds = ", ".join(f"`{kind}`" for kind in PARTS)
            raise UnsupportedParameter(
                f"`{field}.type`: parts of {named} are not served; those of {kinds} are, images as {IMAGE_PART}.",
                f"{field}.type",
            )


def _refuse_other_media(holder: ChatMessage | ContentPart, field: str) -> None:
    """Raise UnsupportedParameter for media under another name, because an answer that ignores them would be wrong."""
    for name in MEDIA_IN_MESSAGES if isinstance(holder, ChatMessage) else MEDIA_IN_PARTS:
        raw = getattr(holder, name)
        if raw is not UNSET and name != getattr(holder, "type", None) and _holds_something(raw):
            raise UnsupportedParameter(
                f"`{field}.{name}` is not read here; send images as parts of a message's `content`: {IMAGE_PART}.",
                f"{field}.{name}",
            )


def _holds_something(raw: Raw) -> bool:
    """Return whether a raw value is neither null nor empty."""
    return memoryview(raw).nbytes > MAX_EMPTY_BYTES or bool(parse(raw, object))


def _thinking(request: ChatRequest | TokenizeRequest, switches: tuple[str, ...]) -> dict[str, bool]:
    """Return the template's switch for reasoning, if `enable_thinking` or `reasoning_effort` sets it.

    Templates know only on and off, so every effort except "none" means on. If the template has no such switch, neither
    field has an effect. Raises InvalidValue if the request contradicts itself.
    """
    effort = request.reasoning_effort
    switch = _thinking_switch(switches)
    if effort is not None and effort not in EFFORTS:
        raise InvalidValue(f"`reasoning_effort` must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
    from_effort = None if effort is None else effort != "none"
    fields = {"enable_thinking": request.enable_thinking, "reasoning_effort": from_effort}
    if switch is None or set(fields.values()) == {None}:
        return {}
    fields[f"chat_template_kwargs.{switch}"] = (request.chat_template_kwargs or {}).get(switch)
    settings = {field: value for field, value in fields.items() if value is not None}
    if len(set(settings.values())) > 1:
        raise InvalidValue(
            f"{' and '.join(f'`{field}`' for field in settings)} contradict each other; send one of them.",
            next(iter(settings)),
        )
    return {switch: bool(next(iter(settings.values())))}


def _thinking_switch(switches: tuple[str, ...]) -> str | None:
    return next((name for name in THINKING_SWITCHES if name in switches), None)


def _unobeyed(request: ChatRequest | TokenizeRequest, switches: tuple[str, ...]) -> str:
    """Return a warning about settings that this template, or any template, ignores; "" if there are none."""
    remarks = list[str]()
    if _thinking_switch(switches) is None:
        settings = {
            "reasoning_effort": request.reasoning_effort not in (None, "none"),
            "enable_thinking": request.enable_thinking,
            "chat_template_kwargs.enable_thinking": (request.chat_template_kwargs or {}).get("enable_thinking"),
        }
        remarks += [f"`{name}` {NO_SWITCH}" for name, is_on in settings.items() if is_on]
    if isinstance(request, ChatRequest) and request.verbosity in ("low", "high"):
        remarks.append(VERBOSITY)
    return "; ".join(remarks)


def _read_switches(arguments: Mapping[str, Any] | None, switches: tuple[str, ...]) -> dict[str, Any]:
    """Return the template switches in *arguments*; only *switches*, those that the family declares, are allowed.

    `enable_thinking` is ignored if the template has no such switch.
    """
    without_effect = () if set(THINKING_SWITCHES) & set(switches) else ("enable_thinking",)
    for name, value in (arguments or {}).items():
        field = f"chat_template_kwargs.{excerpt(name)}"
        if name not in switches and name not in without_effect:
            offer = f"; it has {', '.join(f'`{switch}`' for switch in switches)}." if switches else ", which has none."
            raise UnsupportedParameter(f"`{field}` is not a switch of this model's chat template{offer}", field)
        if not _is_plain(value):
            raise InvalidValue(
                f"`{field}` must be true, false, null, a number up to {MAX_SWITCH} or a text of up to "
                f"{MAX_SWITCH_CHARACTERS} characters.",
                field,
            )
    return {name: value for name, value in (arguments or {}).items() if name in switches}


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_SWITCH_CHARACTERS
    return value is None or (isinstance(value, int | float) and abs(value) <= MAX_SWITCH)
