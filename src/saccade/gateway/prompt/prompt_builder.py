"""Turns a request into the token ids of its prompt, with room for its images.

The length of a prompt's text is checked first, so a text that is too long is refused before anything is fetched or
tokenised. An image's tokens are counted from its header alone, so no pixel is decoded for a prompt that is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from saccade.errors import ContextLengthExceeded, InvalidValue, RequestError, TooManyImages, UnsupportedParameter
from saccade.gateway.chat import Chat, PlainPrompt
from saccade.gateway.chat_request import ChatRequest, TokenizeRequest
from saccade.gateway.field_schemas import IMAGE_PART
from saccade.gateway.prompt.media_options import NO_DEFAULTS, RequestDefaults
from saccade.gateway.prompt.messages import num_characters
from saccade.gateway.prompt.piece_cache import PIECES_BYTES, PieceCache
from saccade.gateway.prompt.placeholders import expand, write_images
from saccade.gateway.prompt.prompt_bounds import check_context, num_completion, read_chat_that_may_fit
from saccade.gateway.prompt.rendering import render, template_of
from saccade.gateway.prompt.tools import check_history, check_served
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.work_threads import WorkThreads
from saccade.media.header import MediaLimits
from saccade.models.family import VideoOptions
from saccade.protocol.media import ImageLayout, Span
from saccade.protocol.needs import NO_NEED, Need
from saccade.telemetry import Metrics

THREAD_FROM_CHARACTERS = 16 * 1024
"""Longer text is processed in a thread; shorter text takes less time than the switch to a thread."""


@dataclass(frozen=True)
class PromptTokens:
    """The token ids of a prompt; the tokens of image i are in spans[i]."""

    token_ids: list[int]
    spans: tuple[tuple[Span, ...], ...] = ()


@dataclass(frozen=True)
class PromptBuilder:
    """Turns requests into token ids.

    *limits* bound the images and videos of a request. Requests may bring their own chat template only if
    *takes_templates* is true. *defaults* apply to what requests do not set.
    """

    limits: MediaLimits
    metrics: Metrics
    threads: WorkThreads
    takes_templates: bool = False
    defaults: RequestDefaults = NO_DEFAULTS
    pieces: PieceCache = field(default_factory=lambda: PieceCache(PIECES_BYTES))

    def read_chat(self, served: ServedModel, request: ChatRequest | TokenizeRequest) -> Chat:
        """Return the chat in *request*. Raises a RequestError that names the field."""
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
        """Read a chat as read_chat() does, but in a thread, because the request is_long()."""
        return await self.threads.run_work(True, 0, lambda: self.read_chat(served, request))

    async def read_plain(self, served: ServedModel, request: ChatRequest, prompts: Sequence[PlainPrompt]) -> list[Chat]:
        """Return a Chat with the token ids of each prompt. Raises RequestError, for example if a prompt is too long."""
        long = sum(len(prompt.content) for prompt in prompts) > THREAD_FROM_CHARACTERS
        return [await self._read_plain(served, request, prompt, long) for prompt in prompts]

    async def _read_plain(self, served: ServedModel, request: ChatRequest, prompt: PlainPrompt, long: bool) -> Chat:
        with self.metrics.stage("tokenize"):
            encode = partial(_plain_token_ids, served, request, prompt)
            token_ids = await self._encode(long, 0, encode, prompt.field)
        if not token_ids:
            raise InvalidValue(f"`{prompt.field}` has no tokens; this model needs one at least.", prompt.field)
        # If one of several prompts does not fit, the request fails before the others are answered.
        if len(token_ids) + num_completion(request) > served.max_model_len:
            field = "max_tokens" if len(token_ids) < served.max_model_len else prompt.field
            raise ContextLengthExceeded.of(served.max_model_len, len(token_ids), num_completion(request), field)
        return Chat.of_plain(token_ids)

    async def build_prompt(
        self,
        served: ServedModel,
        request: ChatRequest | TokenizeRequest,
        chat: Chat,
        layouts: Sequence[ImageLayout] = (),
        num_image_bytes: int = 0,
        *,
        lacks: Need = NO_NEED,
        salt: bytes = b"",
    ) -> PromptTokens:
        """Return the token ids of *chat*; image i has layouts[i].

        The encoded images have *num_image_bytes* together. No worker serves the needs in *lacks*: without TOKEN_IDS,
        the ids are those that vLLM would compute. Parts of a long chat that the tenant with *salt* has sent before are
        not encoded again if they are still cached. Raises a RequestError that names the field.
        """
        if chat.plain is not None:
            return PromptTokens(chat.plain)
        # Image processors add a BOS that the template did not write; for text alone, transformers adds none either.
        adds_bos = served.declaration.takes_images and Need.TOKEN_IDS not in lacks
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
        return PromptTokens(expanded, spans)

    async def token_ids(self, served: ServedModel, text: str) -> list[int]:
        """Return the token ids of plain *text*. Raises InvalidValue."""
        long = len(text) > THREAD_FROM_CHARACTERS
        return await self._encode(long, len(text), lambda: served.tokenizer.encode_text(text), "prompt")

    async def text_of(self, served: ServedModel, token_ids: Sequence[int]) -> str:
        """Return the text of *token_ids*, including special tokens."""
        long = len(token_ids) > THREAD_FROM_CHARACTERS
        return await self.threads.run_work(long, len(token_ids), lambda: served.tokenizer.decode(token_ids))

    def _check_media(self, served: ServedModel, chat: Chat) -> None:
        """Raise RequestError for too many images or videos, and for videos if the model takes none."""
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
            return await self.threads.run_work(long, num_bytes, encode)
        except RequestError as error:
            raise error.at(field) from error


def is_long(request: ChatRequest | TokenizeRequest) -> bool:
    """Return whether reading the chat in *request* would block the event loop for too long."""
    return request.chat_template is not None or num_characters(request) > THREAD_FROM_CHARACTERS


def _plain_token_ids(served: ServedModel, request: ChatRequest, prompt: PlainPrompt) -> list[int]:
    """Return the token ids of *prompt*. Raises ContextLengthExceeded for a text that cannot fit, and InvalidValue."""
    content, field = prompt.content, prompt.field
    if isinstance(content, str):
        least = served.tokenizer.text_bound.least_tokens(content)
        if least > served.max_model_len:
            raise ContextLengthExceeded.of(served.max_model_len, least, num_completion(request), field, at_least=True)
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
