"""What a worker sends of an answer is no more than the request asked for."""

import math

import msgspec
import pytest
from echo_worker import ask, tokens
from fronts import Front, talking
from streams import generate
from waiting import until

from saccade.connectors.answer_bounds import MAX_EMPTY_DELTAS, MAX_QUESTIONS, AnswerBounds
from saccade.errors import WorkerFailed
from saccade.protocol.output import FinishReason, PixelsWanted, StepFrame, TokenDelta, TokenLogprob
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand
from saccade.transport.gateway_streams import GatewayStream

LENGTH = FinishReason.LENGTH
PLAIN = TokenLogprob(-1.0, 1)


def delta(*token_ids: int, index: int = 0, logprobs: int = 0, num_top: int = 0, prompt: int = 0) -> TokenDelta:
    one = TokenLogprob(-1.0, 1, [5] * num_top, [-1.0] * num_top)
    return TokenDelta("r", list(token_ids), index=index, logprobs=[one] * logprobs, prompt_logprobs=[PLAIN] * prompt)


def test_answer_stays_within_the_request() -> None:
    """A request for two samples of four tokens, with log probabilities of two others each; the prompt has three tokens
    and two images.
    """
    request = ask("r", [1, 2, 3], "a", "b")
    sampling = msgspec.structs.replace(request.sampling, max_tokens=4, num_logprobs=2)
    request = msgspec.structs.replace(request, num_samples=2, sampling=sampling)
    end = TokenDelta("r", [], LENGTH)
    nan, infinite = (TokenDelta("r", [1], logprobs=[TokenLogprob(value, 1)]) for value in (math.nan, math.inf))
    nan_beside = TokenDelta("r", [1], logprobs=[TokenLogprob(-1.0, 1, [5], [math.nan])])
    undrawable = TokenDelta("r", [1], logprobs=[TokenLogprob(-math.inf, 9)])
    first, both = PixelsWanted("r", [0]), PixelsWanted("r", [0, 1])
    table: dict[str, tuple[list[TokenDelta | PixelsWanted], bool]] = {
        "all tokens of both": ([delta(1, 2, 3), delta(4), delta(1, 2, 3, 4, index=1), end], True),
        "ids that no vocabulary has": ([delta(10**9, -7)], True),
        "as many log probabilities": ([delta(1, 2, logprobs=2, num_top=2, prompt=2)], True),
        "the drawn token beside the likeliest": ([delta(1, logprobs=1, num_top=3)], True),
        "a token that could not be drawn": ([undrawable], True),
        "questions of a request that was preempted": ([first, *[both] * (MAX_QUESTIONS - 1)], True),
        "one token too many": ([delta(1, 2, 3, 4), delta(5)], False),
        "too many at once": ([delta(*range(300_000))], False),
        "a sample before the first": ([delta(1, index=-1)], False),
        "a sample after the last": ([delta(1, index=2)], False),
        "a log probability without a token": ([delta(1, logprobs=2)], False),
        "too many likeliest tokens": ([delta(1, logprobs=1, num_top=4)], False),
        "a prompt again and again": ([delta(1, prompt=2), delta(1, prompt=2)], False),
        "nothing, for ever": ([delta()] * (MAX_EMPTY_DELTAS + 1), False),
        "questions for ever": ([first] * (MAX_QUESTIONS + 1), False),
        "a question about nothing": ([PixelsWanted("r", [])], False),
        "a question about one image 50,000 times": ([PixelsWanted("r", [0] * 50_000)], False),
        "an image twice": ([PixelsWanted("r", [1, 1])], False),
        "an image after the last": ([PixelsWanted("r", [0, 2])], False),
        "an image before the first": ([PixelsWanted("r", [-1])], False),
        "a log probability that is NaN": ([nan], False),
        "a log probability that is infinite": ([infinite], False),
        "NaN of another token": ([nan_beside], False),
    }
    for name, (messages, is_right) in table.items():
        bounds, failed = AnswerBounds(request), False
        try:
            for message in messages:
                bounds.check(message)
        except WorkerFailed:
            failed = True
        assert failed is not is_right, name


async def test_endless_answer_fails_its_request_and_is_aborted() -> None:
    class Endless(Front):
        """Sends 16 tokens for each that is asked for, before the gateway's loop runs again."""

        def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
            if isinstance(command, EngineRequest):
                frame = msgspec.msgpack.encode(StepFrame([TokenDelta(command.request_id, [300])]))
                for _ in range(16 * command.sampling.max_tokens):
                    connection.send(frame)
                connection.send(msgspec.msgpack.encode(StepFrame([TokenDelta(command.request_id, [], LENGTH)])))

    front = Endless()
    request = ask("r", [1])
    async with talking("127.0.0.1:0", front) as client:
        read: list[int] = []

        async def read_all() -> None:
            async for each in generate(client, request):
                read.extend(each.token_ids)

        with pytest.raises(WorkerFailed, match="more than was asked for"):
            await read_all()
        assert len(read) == request.sampling.max_tokens
        await until(lambda: Abort(request_id="r") in front.commands)
        assert client.ready
        with pytest.raises(WorkerFailed):
            await tokens(client, ask("next", [1]))  # other requests go on
