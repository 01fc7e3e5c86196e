"""Phi-3-vision through HTTP, the gateway, our wire and our engine. # A4, A10"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chats import Part, openai_messages, random_image, reference_messages
from processor_answers import check_json
from references.phi3_v import Phi3V
from references.phi3_v_network import Phi3VOracle
from server import Server, serving

from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.conformance

NUM_TOKENS = 10
CHATS: dict[str, tuple[Part, ...]] = {
    "text only": ("What is it?",),
    "two images between texts": ("First:", random_image(150, 100, 4), "then", random_image(70, 230, 5), "which is it?"),
}


@pytest.fixture(scope="module")
def folder(network_folder: Callable[[str], Path]) -> Path:
    return network_folder("phi3_v")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--max-model-len", "4096") as server:
        yield server


def prompt(reference: Phi3V, parts: tuple[Part, ...]) -> EngineRequest:
    """The chat's ids and pixels by the reference alone."""
    messages, images = reference_messages(*parts)
    seen = [reference.see(image) for image in images]
    token_ids = reference.token_ids(reference.render(messages, True, {}), seen)
    media, start = [], 0
    for one in seen:
        assert one.pixels is not None
        assert one.grid is not None
        start = token_ids.index(reference.placeholder_token_id, start)
        span = Span(start, one.num_tokens)
        media.append(
            MediaItem(
                modality="image",
                content_hash=b"",
                grid=one.grid,
                spans=(span,),
                pixel_shape=one.pixels.shape,
                inline=one.pixels.tobytes(),
            )
        )
        start += one.num_tokens
    return EngineRequest(request_id="a", token_ids=token_ids, sampling=SamplingParams(max_tokens=1), media=tuple(media))


@pytest.mark.parametrize("parts", CHATS.values(), ids=CHATS.keys())
def test_answer_equals_the_reference(server: Server, folder: Path, parts: tuple[Part, ...]) -> None:
    reference, oracle = Phi3V(folder), Phi3VOracle(folder, long=False)
    asked = prompt(reference, parts)
    token_ids: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = oracle.logits(asked, [*token_ids, 0])[-1].clone()
        logits[list(oracle.placeholder_token_ids)] = float("-inf")
        token_ids.append(int(logits.argmax()))
    answer = server.client().chat.completions.create(
        model=server.model, messages=openai_messages(*parts), max_tokens=NUM_TOKENS, temperature=0
    )
    assert answer.usage.prompt_tokens == len(asked.token_ids)
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert (
        answer.choices[0].message.content.strip()
        == reference.tokenizer.decode(token_ids, skip_special_tokens=True).strip()
    )


def test_json(server: Server) -> None:  # F13
    check_json(server)
