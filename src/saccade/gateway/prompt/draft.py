"""From a request to the token ids of its prompt, with room for its images.

A prompt that is too long is refused by the bytes of its text first, before anything is fetched or tokenised. An image's
tokens are counted from its header alone, so a refusal costs little: no pixel is decoded.
"""

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from blake3 import blake3

from saccade.byte_lru import TenantLru
from saccade.errors import ContextLengthExceeded, InvalidValue, RequestError, TooManyImages, UnsupportedParameter
from saccade.gateway.chat import Chat, PlainPrompt
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.field_schemas import IMAGE_PART
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.prompt.media_options import NO_DEFAULTS, RequestDefaults
from saccade.gateway.prompt.messages import num_characters, read_chat
from saccade.gateway.prompt.sent_texts import check_sent_texts
from saccade.gateway.prompt.tools import check_history, check_served, place_result_images, texts_in
from saccade.gateway.prompt.turns import rewrite_turns
from saccade.gateway.served_models.served_model import Placeholders, ServedModel, media_segments
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import MediaLimits
from saccade.models.family import VideoOptions
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.media import ImageLayout, Span
from saccade.telemetry import Metrics
from saccade.tokenization.chat_template import TEXT_FIELDS, ChatTemplate
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.tokenizer import Segment

THREAD_FROM_CHARACTERS = 16 * 1024
"""Longer text is processed in a thread; shorter text takes less time than the switch to a thread."""

PIECES_BYTES = 32 << 20
"""Of token ids of texts that are kept for the next turns of long chats: four bytes for each token."""

MAX_UTF8_BYTES = 4
"""Bytes of a character, at most."""

PIECE_BYTES = 256
"""Bytes of one of them besides its ids, at most."""


class PieceCache:
    """The ids of each tenant's texts: the time that a prompt takes tells a tenant nothing about others."""

    def __init__(self, budget_bytes: int) -> None:
        self._ids: TenantLru[bytes, array[int]] = TenantLru(budget_bytes)
        self._lock = threading.Lock()
        self.memory_part = MemoryPart("prompt_pieces", budget_bytes, lambda: self._ids.num_bytes)

    def encode(
        self, salt: bytes, tokenizer: bytes, texts: Sequence[str], encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Return the ids of *texts* together: those that the tenant with *salt* has used, and what *encode* returns.

        *tokenizer* names the tokenizer. Threads may call this at the same time.
        """
        token_ids: list[int] = []
        for text in texts:
            key = blake3(tokenizer).update(text.encode(errors="surrogatepass")).digest()
            with self._lock:
                ids = self._ids.of(salt).get(key)
            if ids is None:
                ids = array("I", encode(text))
                with self._lock:
                    self._ids.put(salt, key, ids, PIECE_BYTES + ids.itemsize * len(ids))
            token_ids += ids
        return token_ids


@dataclass(frozen=True)
class Draft:
    """The token ids of a prompt; the tokens of image i lie in spans[i]."""

    token_ids: list[int]
    spans: tuple[tuple[Span, ...], ...] = ()


@dataclass(frozen=True)
class PromptDrafter:
    """Turns requests into token ids. *limits* bound the images and videos of a request. Requests may bring their own
    chat template only if it *takes_templates*. *defaults* are for what requests do not set.
    """

    limits: MediaLimits
    metrics: Metrics
    threads: WorkThreads
    takes_templates: bool = False
    defaults: RequestDefaults = NO_DEFAULTS
    pieces: PieceCache = field(default_factory=lambda: PieceCache(PIECES_BYTES))

    def read(self, served: ServedModel, request: ChatRequest | TokenizeRequest) -> Chat:
        """Return the chat in *request*. Raises RequestError, naming the field."""
        if request.chat_template is not None and not self.takes_templates:
            raise UnsupportedParameter(
                "`chat_template`: this server renders chats with the model's own template only, unless its operator "
                "starts it with --trust-request-chat-template; leave it out.",
                "chat_template",
            )
        chat = read_chat_that_may_fit(request, served, self.defaults)
        self._check_media(served, chat)
        template = template_of(served, chat)
        check_served(chat.tools, served.tool_calls is not None, template.takes_tools)
        check_history(chat.client_messages, template)
        return chat

    async def read_long(self, served: ServedModel, request: ChatRequest | TokenizeRequest) -> Chat:
        """As read(), in a thread, for a request that `is_long`."""
        return await self.threads.run(True, 0, lambda: self.read(served, request))

    async def read_plain(self, served: ServedModel, request: ChatRequest, prompts: Sequence[PlainPrompt]) -> list[Chat]:
        """Return a Chat with the token ids of each of *prompts*. Raises RequestError, also if one is too long."""
        long = sum(len(prompt.content) for prompt in prompts) > THREAD_FROM_CHARACTERS
        return [await self._read_plain(served, request, prompt, long) for prompt in prompts]

    async def _read_plain(self, served: ServedModel, request: ChatRequest, prompt: PlainPrompt, long: bool) -> Chat:
        with self.metrics.stage("tokenize"):
            encode = partial(_plain_token_ids, served, request, prompt)
            token_ids = await self._encode(long, 0, encode, prompt.field)
        if not token_ids:
            raise InvalidValue(f"`{prompt.field}` has no tokens; this model needs one at least.", prompt.field)
        # If one of several prompts does not fit, the request fails before the others are answered.
        if len(token_ids) + _num_completion(request) > served.max_model_len:
            field = "max_tokens" if len(token_ids) < served.max_model_len else prompt.field
            raise ContextLengthExceeded.of(served.max_model_len, len(token_ids), _num_completion(request), field)
        return Chat.of_plain(token_ids)

    async def draft(
        self,
        served: ServedModel,
        request: ChatRequest | TokenizeRequest,
        chat: Chat,
        layouts: Sequence[ImageLayout] = (),
        num_image_bytes: int = 0,
        *,
        as_vllm_chat: bool = False,
        salt: bytes = b"",
    ) -> Draft:
        """Return the token ids of *chat*; image i has layouts[i].

        The encoded images have *num_image_bytes* together. With *as_vllm_chat* the ids are those that vLLM would
        compute. Parts of a long chat that the tenant with *salt* has sent before are not encoded again. Raises
        RequestError, naming the field.
        """
        if chat.plain is not None:
            return Draft(chat.plain)
        # Processors of images add a BOS that the template did not write; for text alone, transformers adds none either.
        adds_bos = served.declaration.takes_images and not as_vllm_chat
        encode = served.tokenizer.encode if adds_bos else served.tokenizer.encode_as_vllm_chat
        placeholders, long = served.placeholders, chat.num_characters > THREAD_FROM_CHARACTERS
        pieces = partial(self.pieces.encode, salt, served.scope) if long else None
        with self.metrics.stage("tokenize"):
            token_ids = await self._encode(
                long,
                num_image_bytes,
                lambda: encode(
                    write_images(render(served, chat), served.tokenizer.special_tokens, placeholders, layouts),
                    pieces,
                ),
                "messages",
            )
        expanded, spans = expand(token_ids, placeholders, layouts)
        check_context(len(expanded), request, served)
        return Draft(expanded, spans)

    async def token_ids(self, served: ServedModel, text: str) -> list[int]:
        """Return the token ids of plain *text*. Raises InvalidValue."""
        long = len(text) > THREAD_FROM_CHARACTERS
        return await self._encode(long, len(text), lambda: served.tokenizer.encode_text(text), "prompt")

    async def text_of(self, served: ServedModel, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids*, including special tokens."""
        long = len(token_ids) > THREAD_FROM_CHARACTERS
        return await self.threads.run(long, len(token_ids), lambda: served.tokenizer.decode(token_ids))

    def _check_media(self, served: ServedModel, chat: Chat) -> None:
        """Raise RequestError for too many images or videos, and for videos of a model that takes none."""
        videos = [source for source in chat.images if isinstance(source.options, VideoOptions)]
        if videos and served.videos is None:
            raise UnsupportedParameter(
                f"`{videos[0].field}`: this model takes no videos here; send images, as {IMAGE_PART}.",
                videos[0].field,
            )
        num_images = len(chat.images) - len(videos) + sum(source.num_fetched_frames for source in videos)
        for kind, number, most in (
            ("images", num_images, self.limits.images),
            ("videos", len(videos), self.limits.videos),
        ):
            if number > most:
                raise TooManyImages(
                    f"The messages have {number} {kind}; at most {most} are served (--limit-mm-per-prompt). "
                    "Send fewer.",
                    "messages",
                )

    async def _encode(self, long: bool, num_bytes: int, encode: Callable[[], list[int]], field: str) -> list[int]:
        try:
            return await self.threads.run(long, num_bytes, encode)
        except RequestError as error:
            raise error.at(field) from error


def is_long(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether reading the chat in *request* would block the event loop for long."""
    return request.chat_template is not None or num_characters(request) > THREAD_FROM_CHARACTERS


def read_chat_that_may_fit(
    request: ChatRequest | TokenizeRequest, served: ServedModel, defaults: RequestDefaults = NO_DEFAULTS
) -> Chat:
    """Return the chat in *request*, its turns in a form that the template writes.

    Raises RequestError, also ContextLengthExceeded if its text cannot fit. A template may leave text out, such as the
    reasoning of earlier turns. So a chat with too much text is rendered, and the rendered text decides.
    """
    chat = read_chat(request, served.declaration, defaults)
    if request.chat_template is not None:
        chat = replace(chat, template=served.template.replaced_by(request.chat_template))
    template = template_of(served, chat)
    turns, warning = rewrite_turns(chat.messages, template.turns)
    warning = "; ".join(filter(None, (chat.warning, warning)))
    chat = replace(chat, messages=place_result_images(turns, template), client_messages=chat.messages, warning=warning)
    texts = list(texts_of(chat))
    if sum(map(len, texts)) * MAX_UTF8_BYTES <= served.max_model_len:
        return chat
    bound = served.tokenizer.text_bound
    if bound.least_tokens("".join(texts)) <= served.max_model_len:
        return chat
    segments = render(served, chat)
    rendered = "".join(segment.text for segment in segments if not segment.is_special)
    if (least := bound.least_tokens(rendered)) > served.max_model_len:
        raise ContextLengthExceeded.of(served.max_model_len, least, _num_completion(request), "messages", at_least=True)
    return chat


def render(served: ServedModel, chat: Chat) -> list[Segment]:
    """Return the prompt of *chat* as the model's template writes it.

    Raises InvalidValue if the template refuses the chat, or leaves out a text of the request.
    """
    template = template_of(served, chat)
    segments = template.render(
        chat.messages, chat.add_generation_prompt, chat.switches, chat.tools, continues=chat.continues
    )
    prompt = "".join(segment.text for segment in segments)
    check_sent_texts(chat.client_messages, prompt, served.declaration.reasoning.end, template.turns.results_first)
    return segments


def template_of(served: ServedModel, chat: Chat) -> ChatTemplate:
    """Return the template that renders *chat*."""
    return chat.template or served.template


def _plain_token_ids(served: ServedModel, request: ChatRequest, prompt: PlainPrompt) -> list[int]:
    """Return the token ids of *prompt*. Raises ContextLengthExceeded for a text that cannot fit, and InvalidValue."""
    content, field = prompt.content, prompt.field
    if isinstance(content, str):
        least = served.tokenizer.text_bound.least_tokens(content)
        if least > served.max_model_len:
            raise ContextLengthExceeded.of(served.max_model_len, least, _num_completion(request), field, at_least=True)
        return served.tokenizer.encode_text(content)
    if (largest := max(content, default=0)) >= served.tokenizer.num_tokens:
        raise InvalidValue(
            f"`{field}` has the token {largest}; this model's tokens end at {served.tokenizer.num_tokens - 1}.", field
        )
    if served.placeholder_token_id in content:
        raise InvalidValue(
            f"`{field}` has the token {served.placeholder_token_id}, which stands for images; send images to "
            "/v1/chat/completions.",
            field,
        )
    return content


def check_context(num_prompt_tokens: int, request: ChatRequest | TokenizeRequest, served: ServedModel) -> None:
    """Raise ContextLengthExceeded for a prompt that does not fit even without an answer."""
    if num_prompt_tokens > served.max_model_len:
        completion = _num_completion(request)
        raise ContextLengthExceeded.of(served.max_model_len, num_prompt_tokens, completion, "messages")


def texts_of(chat: Chat) -> list[str]:
    """Return every text of *chat* that the template may write."""
    texts = [switch for switch in chat.switches.values() if isinstance(switch, str)]
    texts += texts_in(chat.tools) if chat.tools else []
    for message in chat.messages:
        texts += [message.get(field, "") for field in TEXT_FIELDS]
        texts += texts_in(message.get("tool_calls", []))
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return texts


def _num_completion(request: ChatRequest | TokenizeRequest) -> int:
    return request.needed_tokens if isinstance(request, ChatRequest) else 0


def runs(layout: ImageLayout) -> list[int]:
    """Return the lengths of the runs of placeholders of an image or video, in order."""
    return [piece for piece in layout.prompt if isinstance(piece, int)] or [layout.num_tokens]


def write_images(
    segments: Sequence[Segment],
    special_tokens: Mapping[str, int],
    placeholders: Placeholders,
    layouts: Sequence[ImageLayout],
) -> Iterator[Segment]:
    """Yield a rendered prompt in which each of *layouts* replaces the template's text by its own.

    Every run of placeholders is one placeholder, which `expand` repeats. A prompt whose images differ from *layouts*
    stays unchanged, and `expand` refuses it. Raises InvalidValue if videos differ.
    """
    segments_of_media = list(media_segments(segments, special_tokens, placeholders))
    if [is_video for _, _, is_video in segments_of_media] != [bool(layout.frames) for layout in layouts]:
        if any(is_video for _, _, is_video in segments_of_media) or any(layout.frames for layout in layouts):
            raise _refusal(len(segments_of_media), len(layouts))
        yield from segments
        return
    position = 0
    for (start, stop, is_video), layout in zip(segments_of_media, layouts, strict=True):
        yield from segments[position:start]
        placeholder = segments[start]
        if is_video or placeholders.template_mark is not None:
            placeholder = Segment(placeholders.video if is_video else placeholders.image_token, is_special=True)
        for piece in layout.prompt or (layout.num_tokens,):
            yield placeholder if isinstance(piece, int) else Segment(piece, piece in special_tokens)
        position = stop
    yield from segments[position:]


def expand(
    token_ids: list[int], placeholders: Placeholders, layouts: Sequence[ImageLayout]
) -> tuple[list[int], tuple[tuple[Span, ...], ...]]:
    """Repeat each placeholder of *layouts* to the length of its run.

    Return the ids, and the spans of each image or video. Raises InvalidValue if the placeholders of the prompt are not
    those of the runs.
    """
    places = sorted(place for placeholder in placeholders.ids for place in _places(token_ids, placeholder))
    expected = [placeholders.of(layout) for layout in layouts for _ in runs(layout)]
    if [token_ids[place] for place in places] != expected:
        raise _refusal(len(places), len(layouts))
    expanded: list[int] = []
    spans: list[tuple[Span, ...]] = []
    position, pending = 0, iter(places)
    for layout in layouts:
        of_item: list[Span] = []
        for length in runs(layout):
            place = next(pending)
            expanded += token_ids[position:place]
            of_item.append(Span(len(expanded), length))
            expanded += [placeholders.of(layout)] * length
            position = place + 1
        spans.append(tuple(of_item))
    return expanded + token_ids[position:], tuple(spans)


def _places(token_ids: list[int], placeholder: int) -> Iterator[int]:
    place = -1
    for _ in range(token_ids.count(placeholder)):
        place = token_ids.index(placeholder, place + 1)
        yield place


def _refusal(num_written: int, num_sent: int) -> InvalidValue:
    return InvalidValue(
        f"The model's chat template makes room for {num_written} images and videos; the messages hold {num_sent}, or "
        "in another order.",
        "messages",
    )


def chat_prompt(served: ServedModel, chat: Chat, images: Sequence[bytes]) -> ChatPrompt:
    """Return *chat* for a worker that renders and tokenises it; *images* are its encoded images."""
    return ChatPrompt(tuple(served.template.tagged(chat.messages)), tuple(images), chat.switches)


def why_not_as_chat(
    served: ServedModel, chat: Chat, image_settings: Sequence[Mapping[str, Any]], limits: Sequence[str] = ()
) -> RequestError | None:
    """Return why a worker that renders and tokenises *chat* itself would get another prompt; None if it would not.

    Such a worker takes special tokens in users' text for the template's, and processes images with its own settings.
    *image_settings* are the processor settings of the chat's images, and *limits* the fields of those of single images.
    """
    contents = [message["content"] for message in chat.messages if not isinstance(message["content"], str)]
    if any(part["type"] == "video" for parts in contents for part in parts):
        return UnsupportedParameter("This model's workers take no videos.", "messages")
    if chat.has_pdfs:
        return UnsupportedParameter("This model's workers take no PDFs; send the pages as images.", "messages")
    if chat.uses_tools:
        return UnsupportedParameter("This model's workers take no chats with tools.", "tools")
    if chat.plain is not None:
        return UnsupportedParameter("This model's workers take chats only.", "prompt")
    if not served.has_own_template:
        return UnsupportedParameter(
            "This model's workers render chats with its own template, and this server has --chat-template.", "messages"
        )
    if chat.template is not None:
        return UnsupportedParameter("`chat_template` is not served by this model's workers.", "chat_template")
    if chat.continues:
        # An API without this field names its `messages` here.
        field = "continue_final_message"
        return UnsupportedParameter(
            f"`{field}`: this model's workers continue no message; end with a message of the user.", field
        )
    if not chat.add_generation_prompt:
        field = "add_generation_prompt"
        return UnsupportedParameter(f"`{field}` is not served by this model's workers; leave it out.", field)
    tag = ImageTag(served.declaration.image_tag or served.declaration.placeholder)
    special = [token for token in served.tokenizer.special_tokens if token.strip()]
    texts = texts_of(chat)
    if any(token in text for text in texts for token in special) or (tag.form and any(map(tag.pattern.search, texts))):
        return InvalidValue(
            "The messages contain a special token of this model as text, which its workers cannot tell from a real "
            "one; remove it.",
            "messages",
        )
    if any(settings != served.layout.settings for settings in image_settings):
        named = ", ".join(f"`{field}`" for field in (*limits, "mm_processor_kwargs"))
        return UnsupportedParameter(
            f"This model's workers process all images alike: leave out {named} and `detail`.",
            limits[0] if limits else "messages",
        )
    return None
