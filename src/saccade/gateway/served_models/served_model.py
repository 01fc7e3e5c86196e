"""ServedModel: the gateway's side of a model, built once from the files that its workers send."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

from saccade import models
from saccade.errors import InvalidValue, StartupError
from saccade.identity.content import files_digest, processor_fingerprint
from saccade.media import video_header
from saccade.media.decode import DECODER
from saccade.models import files
from saccade.models.family import Family, Layout, ReasoningParser, ReasoningTags, ToolParser, VideoLayout
from saccade.models.generation_defaults import GenerationDefaults, generation_defaults
from saccade.models.tool_formats import FORMATS, tool_call_tokens
from saccade.models.tool_formats.form import ToolCallTokens
from saccade.protocol.description import ModelFiles
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import (
    CHAT_TEMPLATE_JINJA,
    CHAT_TEMPLATE_JSON,
    CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TIKTOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VIDEO_PREPROCESSOR_CONFIG,
)
from saccade.tokenization.chat_template import ChatTemplate, find_source
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.loading import TokenizerNeeds, load_tokenizer
from saccade.tokenization.markup import END_THINK, THINK, Markup
from saccade.tokenization.tokenizer import Segment, Tokenizer, special_variables

PROCESSOR_FILES = (CONFIG, PREPROCESSOR_CONFIG, PROCESSOR_CONFIG, VIDEO_PREPROCESSOR_CONFIG)
PROBE = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},)
"""The shortest chat with an image; a template must write exactly one placeholder for it."""

TEXT_PROBE = ({"role": "user", "content": [{"type": "text", "text": "What is it?"}]},)
PLAIN_PROBE = ({"role": "user", "content": "What is it?"},)
"""The shortest chat without an image, in both forms; a template must write the same prompt for both."""

VIDEO_PROBE = ({"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is it?"}]},)
"""The same with a video; if the template writes no placeholder for it, the model's videos are refused."""

OPENING_TOKENS = 2
"""A template that opens the reasoning ends in the marker, or in the marker and a line break."""


@dataclass(frozen=True)
class Parsers:
    """Names the parsers for answers: "auto" is the one that the model's family declares, and "none" parses nothing.

    The other values of *reasoning* are vLLM's names of parsers for the markers that "auto" looks for.
    """

    tool_calls: ToolParser = "auto"
    reasoning: ReasoningParser = "auto"

    @property
    def reads_reasoning(self) -> bool:
        return self.reasoning != "none"

    def tool_format(self, family: Family) -> str | None:
        """Return the call format to parse in answers from a model of *family*, or None to parse no calls."""
        if self.tool_calls == "auto":
            return family.tool_format
        return None if self.tool_calls == "none" else self.tool_calls


DECLARED: Final = Parsers()


class Placeholders(NamedTuple):
    """The media placeholders in a model's prompts."""

    image: int | None
    """The id of an image's placeholder; None for a model that reads text only."""
    video_id: int | None = None
    """The id of *video*; None for a model without videos."""
    video: str = ""
    """The token that is a video's placeholder."""
    video_tokens: tuple[str, ...] = ()
    """What a template writes for a video."""
    template_mark: str | None = None
    """What a template writes for an image, if it is not the placeholder."""
    image_token: str = ""
    """The placeholder then."""

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all placeholders."""
        return frozenset(placeholder for placeholder in (self.image, self.video_id) if placeholder is not None)

    def id_of(self, layout: ImageLayout) -> int:
        """Return the placeholder id for the image or video with *layout*. Raises InvalidValue if there is none."""
        token_id = self.image if self.video_id is None or not layout.frames else self.video_id
        if token_id is None:
            raise InvalidValue("This model's prompts have no place for images.", "messages")
        return token_id

    def is_image(self, segment: Segment, special_tokens: Mapping[str, int]) -> bool:
        """Return whether a special *segment* of a rendered prompt stands for an image."""
        if self.template_mark is None:
            return self.image is not None and special_tokens.get(segment.text) == self.image
        return segment.text == self.template_mark


def media_segments(
    segments: Sequence[Segment], special_tokens: Mapping[str, int], placeholders: Placeholders
) -> Iterator[tuple[int, int, bool]]:
    """Yield the segments [start, stop) of each image and video in a rendered prompt, and whether it is a video."""
    position, width = 0, len(placeholders.video_tokens)
    while position < len(segments):
        here = segments[position : position + width]
        is_video = width > 0 and all(one.is_special for one in here)
        if is_video and tuple(one.text for one in here) == placeholders.video_tokens:
            yield position, position + width, True
            position += width
            continue
        segment = segments[position]
        position += 1
        if segment.is_special and placeholders.is_image(segment, special_tokens):
            yield position - 1, position, False


def _ignore(_: str) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class ReasoningTokens:
    """The token ids that enclose reasoning in one model's answers, and the text *header* that begins it.

    A tag may also consist of several tokens (markup.py).
    """

    start_id: int
    end_id: int
    header: str = ""

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, tags: ReasoningTags) -> "ReasoningTokens | None":
        """Return a model's markers, or None if its tokenizer lacks them."""
        if Markup.of_tokenizer(tokenizer) is not None:
            return cls(THINK, END_THINK)
        start_id, end_id = tokenizer.token_id(tags.begin), tokenizer.token_id(tags.end)
        return None if start_id is None or end_id is None else cls(start_id, end_id, tags.header)

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Return whether the token ids *prompt* end within reasoning, so that the answer continues the reasoning."""
        last = list(prompt[-OPENING_TOKENS:])
        return self.start_id in last and self.end_id not in last[last.index(self.start_id) :]


@dataclass(frozen=True)
class VideoSide:
    """What the gateway needs for a model's videos. Their *placeholder* may be the same token as that of images."""

    placeholder: str
    placeholder_token_id: int
    layout: VideoLayout

    def placeholders(self, images: Placeholders) -> Placeholders:
        """Return the placeholders of *images*, together with those of videos."""
        return images._replace(
            video_id=self.placeholder_token_id, video=self.placeholder, video_tokens=self.layout.template_tokens
        )


@dataclass(frozen=True)
class ServedModel:
    """Everything that the gateway needs to serve requests for one model."""

    name: str
    family: str
    declaration: Family
    tokenizer: Tokenizer
    tokenizer_file: str
    """The name of *tokenizer*'s file."""
    template: ChatTemplate
    """The model's own, or the operator's."""
    placeholder_token_id: int | None
    layout: Layout
    files_digest: bytes
    """Covers the files that determine pixels."""
    defaults: GenerationDefaults
    markup: Markup | None
    """Of answers with tags of several tokens."""
    reasoning: ReasoningTokens | None
    tool_calls: ToolCallTokens | None
    max_model_len: int
    created: int
    """Seconds since 1970."""
    videos: VideoSide | None = None
    """None for a model that takes no videos."""
    has_own_template: bool = True
    note: str = ""
    """What its workers note about its answers, for people."""
    scope: bytes = field(default_factory=partial(secrets.token_bytes, 16))
    """Names its tokenizer in caches of token ids."""

    @classmethod
    def from_files(
        cls,
        name: str,
        model_files: ModelFiles,
        max_model_len: int,
        begin: Callable[[str], None] = _ignore,
        parsers: Parsers = DECLARED,
    ) -> "ServedModel":
        """Build the gateway's side of a model from its files. Raises StartupError.

        *begin* is called with the name of the config, tokenizer or template file before each is used. *parsers* is the
        operator's choice of parsers for answers. A gateway first tries the files in a child (model_probe).
        """
        begin(CONFIG)
        config = files.parse_json(model_files, CONFIG)
        family = models.family_of(config)
        declaration = models.families()[family]
        layout = models.load_layout(family)(config, files.image_processor(model_files, declaration))
        declaration = models.declaration(family, layout)
        video_tokens = models.load_video_layout(family).template_tokens if models.takes_videos(family) else ()
        text = text_side(declaration, config, model_files, begin, video_tokens)
        digest = files_digest({file: model_files.files[file] for file in PROCESSOR_FILES if file in model_files.files})
        return cls(
            name=name,
            family=family,
            declaration=declaration,
            tokenizer=text.tokenizer,
            tokenizer_file=_tokenizer_file(declaration, model_files),
            template=text.template,
            placeholder_token_id=text.placeholder_token_id,
            layout=layout,
            files_digest=digest,
            defaults=generation_defaults(model_files, declaration),
            markup=Markup.of_tokenizer(text.tokenizer),
            reasoning=ReasoningTokens.of_tokenizer(text.tokenizer, declaration.reasoning)
            if parsers.reads_reasoning
            else None,
            tool_calls=tool_call_tokens(text.tokenizer, parsers.tool_format(declaration)),
            max_model_len=max_model_len,
            created=int(time.time()),
            videos=_video_side(family, declaration, config, model_files, text),
        )

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """The kinds of content that the model reads."""
        images, videos = self.declaration.takes_images, self.videos is not None
        return ("text", *(("image",) if images else ()), *(("video",) if videos else ()))

    @cached_property
    def placeholders(self) -> Placeholders:
        """The placeholders of images and videos in prompts."""
        images = _image_placeholders(self.declaration, self.placeholder_token_id)
        return images if self.videos is None else self.videos.placeholders(images)

    def fingerprint(self, settings: Mapping[str, Any]) -> bytes:
        """Return what an image's content hash must include about the processor and its *settings*."""
        return processor_fingerprint(settings, self.files_digest, DECODER)

    def video_fingerprint(self, settings: Mapping[str, Any]) -> bytes:
        """Do the same as fingerprint(), for a video that is sampled and processed with *settings*."""
        return processor_fingerprint(settings, self.files_digest, video_header.DECODER)


@dataclass(frozen=True)
class TextSide:
    """The parts of a model that turn a chat into token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate
    placeholder_token_id: int | None


def _image_placeholders(family: Family, token_id: int | None) -> Placeholders:
    return Placeholders(token_id, template_mark=family.template_mark, image_token=family.placeholder)


def _tokenizer_file(family: Family, model_files: ModelFiles) -> str:
    return TIKTOKEN if TIKTOKEN in model_files.files and family.tiktoken_pattern else TOKENIZER


def _template_file(model_files: ModelFiles) -> str:
    names = (name for name in (CHAT_TEMPLATE_JINJA, CHAT_TEMPLATE_JSON) if name in model_files.files)
    return next(names, TOKENIZER_CONFIG)


def _video_side(
    name: str, family: Family, config: Mapping[str, Any], source: ModelFiles, text: TextSide
) -> VideoSide | None:
    """Return the VideoSide, or None if the family, tokenizer or template does not support videos.

    Raises StartupError.
    """
    placeholder, special = family.video_placeholder or "", text.tokenizer.special_tokens
    # If images and videos share a placeholder, config.json names another token, which templates write for a video.
    stated = None if placeholder == family.placeholder else config.get("video_token_id")
    if placeholder not in special or stated not in (None, special[placeholder]):
        return None
    side = VideoSide(
        placeholder,
        special[placeholder],
        models.load_video_layout(name)(config, files.image_processor(source, family), files.video_processor(source)),
    )
    try:
        segments = text.template.render(VIDEO_PROBE)
    except InvalidValue:
        return None
    placeholders = side.placeholders(_image_placeholders(family, text.placeholder_token_id))
    media = list(media_segments(segments, special, placeholders))
    return side if [is_video for _, _, is_video in media] == [True] else None


def _placeholder_id(family: Family, declared: int | None, tokenizer: Tokenizer) -> int | None:
    """Return the id of the image token: *declared*, or the one in *tokenizer*; None for a family without images.

    Raises StartupError.
    """
    if not family.takes_images:
        return None
    token_id = tokenizer.special_tokens.get(family.placeholder) if declared is None else declared
    if token_id is None:
        silent = (
            f"config.json has none of {', '.join(family.placeholder_keys)}, and " if family.placeholder_keys else ""
        )
        raise StartupError(f"Nothing stands for images: {silent}the tokenizer has no token {family.placeholder}.")
    if token_id not in tokenizer.special_tokens.values():
        raise StartupError(
            f"config.json: {' or '.join(family.placeholder_keys)} says that token {token_id} stands for images as "
            f"{family.placeholder} does; the tokenizer has no such special token."
        )
    return token_id


def _template_token_id(family: Family, tokenizer: Tokenizer, placeholder: int | None) -> int | None:
    """Return the id of the token that templates write for an image, or None for a family without images.

    Raises StartupError.
    """
    mark = family.template_mark
    if mark is not None and mark not in tokenizer.special_tokens:
        raise StartupError(f"The tokenizer has no token {mark}, which templates write for an image.")
    return placeholder if mark is None else tokenizer.special_tokens[mark]


def text_side(
    family: Family,
    config: Mapping[str, Any],
    model_files: ModelFiles,
    begin: Callable[[str], None] = _ignore,
    video_tokens: tuple[str, ...] = (),
) -> TextSide:
    """Return the tokenizer, template and placeholder, which must agree about images. Raises StartupError.

    *video_tokens* are the tokens that the template writes for a video; the vocabulary may lack them.
    """
    tokenizer_config = files.parse_json(model_files, TOKENIZER_CONFIG)
    tag = ImageTag(family.image_tag or (f"{family.placeholder}\n" if family.takes_images else ""))
    declared = family.placeholder_token_id(config)
    needs = TokenizerNeeds(family.placeholder, declared, family.tiktoken_pattern, tag, family.split_at_images)
    begin(_tokenizer_file(family, model_files))
    tokenizer = load_tokenizer(model_files.files, tokenizer_config, needs)
    token_id = _placeholder_id(family, declared, tokenizer)
    jinja, template_json = model_files.files.get(CHAT_TEMPLATE_JINJA), model_files.files.get(CHAT_TEMPLATE_JSON)
    source = find_source(jinja, template_json, tokenizer_config, family.template)
    template_file = _template_file(model_files)
    begin(template_file)
    variables, reason = special_variables(tokenizer_config), ""
    image_id = _template_token_id(family, tokenizer, token_id)
    tool_variables = FORMATS[family.tool_format].variables if family.tool_format is not None else None
    for image_tag in (None, tag):
        try:
            special_tokens = {*tokenizer.special_tokens, *video_tokens}
            template = ChatTemplate(source, special_tokens, variables, image_tag, tool_variables)
            if _writes_probe(template, tokenizer, image_id):
                return TextSide(tokenizer, template, token_id)
        except InvalidValue as error:
            reason = f" {error.message}"
        except StartupError as error:
            raise StartupError(f"{template_file}: {error.message}") from error
    missed = "exactly one placeholder for one image" if family.takes_images else "a chat of one message"
    raise StartupError(f"{template_file}: the chat template does not write {missed}.{reason}")


def _writes_probe(template: ChatTemplate, tokenizer: Tokenizer, image_id: int | None) -> bool:
    """Return whether *template* writes an image as a single *image_id*.

    For a model without images, return whether it writes the same prompt for both forms of a text. Raises InvalidValue
    if the template refuses the message.
    """
    if image_id is None:
        return template.render(TEXT_PROBE) == template.render(PLAIN_PROBE)
    return tokenizer.encode(template.render(PROBE)).count(image_id) == 1
