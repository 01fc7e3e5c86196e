"""Pieces of an answer to bytes: whole, or as server-sent events. Both read the same `Answer`."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET

from saccade.gateway.answer import Answer
from saccade.gateway.event_stream import EventStream
from saccade.gateway.logprobs import prompt_logprobs
from saccade.gateway.openai_answers import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
)
from saccade.gateway.sample import Piece, Sample
from saccade.protocol.output import TokenDelta

DONE = b"data: [DONE]\n\n"


async def whole(answer: Answer, deltas: AsyncIterator[TokenDelta]) -> bytes:
    """Return *answer* as one chat.completion object, in JSON."""
    pieces: list[list[Piece]] = [[] for _ in answer.samples]
    async for piece in answer.pieces(deltas):
        pieces[piece.sample.index].append(piece)
    ranked = None
    if answer.request.prompt_logprobs is not None:
        # A long prompt has more entries than the event loop should be held up for.
        tokenizer = answer.served.tokenizer
        ranked = await asyncio.to_thread(prompt_logprobs, tokenizer, answer.prompt_token_ids, answer.prompt_logprobs)
    completion = ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.served.name,
        choices=[_choice(sample, pieces[sample.index]) for sample in answer.samples],
        usage=answer.usage,
        prompt_logprobs=UNSET if ranked is None else ranked,
        prompt_token_ids=answer.prompt_token_ids if answer.request.return_token_ids else UNSET,
    )
    return msgspec.json.encode(completion)


async def send_stream(stream: EventStream, answer: Answer, deltas: AsyncIterator[TokenDelta]) -> None:
    """Send *answer* as chunks: the role of every choice, texts, finish reasons, usage where it is asked for, [DONE]."""
    options = answer.request.stream_options
    with_usage = options is not None and bool(options.include_usage)
    chunk = ChatCompletionChunk(
        id=answer.id, created=answer.created, model=answer.served.name, choices=[], usage=None if with_usage else UNSET
    )
    pending = _roles(chunk, answer)
    async for piece in answer.pieces(deltas):
        if events := _events(chunk, piece):
            await stream.write(pending + events)
            pending = b""
    last = _event(msgspec.structs.replace(chunk, usage=answer.usage)) if with_usage else b""
    await stream.write(last + DONE, more=False)


def _choice(sample: Sample, pieces: list[Piece]) -> Choice:
    content = None if sample.ends_in_reasoning else "".join(piece.content for piece in pieces)
    reasoning = "".join(piece.reasoning for piece in pieces)
    logprobs, token_ids = (None, UNSET) if sample.record is None else sample.record.flush()
    return Choice(
        message=AnswerMessage(content, reasoning or UNSET),
        finish_reason=sample.finish_reason or "",
        index=sample.index,
        logprobs=logprobs,
        token_ids=token_ids,
    )


def _roles(chunk: ChatCompletionChunk, answer: Answer) -> bytes:
    """Return the event that begins each choice; the first has the prompt's token ids where they are asked for."""
    delta = Delta(role="assistant", content="")
    first, *others = (
        msgspec.structs.replace(chunk, choices=[ChunkChoice(delta, index=sample.index)]) for sample in answer.samples
    )
    if answer.request.return_token_ids:
        first = msgspec.structs.replace(first, prompt_token_ids=answer.prompt_token_ids)
    return b"".join(map(_event, (first, *others)))


def _events(chunk: ChatCompletionChunk, piece: Piece) -> bytes:
    """Return one event for reasoning and one for content, where there are; the last one has the finish reason.

    Tokens that a client asked about come with the first event after them.
    """
    sample = piece.sample
    events = b""
    if piece.reasoning:
        events = _event(_with_delta(chunk, sample, Delta(reasoning_content=piece.reasoning)))
    if piece.content or sample.finish_reason is not None:
        delta = Delta(content=piece.content) if piece.content else Delta()
        events += _event(_with_delta(chunk, sample, delta, sample.finish_reason))
    return events


def _with_delta(
    chunk: ChatCompletionChunk, sample: Sample, delta: Delta, finish_reason: str | None = None
) -> ChatCompletionChunk:
    if sample.record is None:
        choice = ChunkChoice(delta, finish_reason, sample.index)
    else:
        choice = ChunkChoice(delta, finish_reason, sample.index, *sample.record.flush())
    return msgspec.structs.replace(chunk, choices=[choice])


def _event(chunk: ChatCompletionChunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
