"""Answers through HTTP, asked with the openai SDK, equal the reference's. # A10"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from chats import Part, openai_messages, random_image, reference_messages
from reference import Reference
from server import Server

BLOCK_SIZE = 16
CHATS: dict[str, tuple[Part, ...]] = {
    "text only": ("What is it?",),
    "one image": (random_image(150, 100, 1), "Describe the image."),
    "two images": (random_image(64, 96, 2), random_image(200, 64, 3), "Compare the two images."),
    "images between texts": ("First:", random_image(96, 96, 4), "then", random_image(70, 130, 5), "which is it?"),  # F1
    "the same image twice": ("Once", random_image(96, 64, 7), "and again", random_image(96, 64, 7), "?"),
    "unicode": (random_image(96, 64, 6), "caf\u00e9 \u4f60\u597d \U0001f600"),
}


def ask(server: Server, parts: tuple[Part, ...], max_tokens: int = 12, **options: object) -> object:
    return server.client().chat.completions.create(
        model=server.model, messages=openai_messages(*parts), max_tokens=max_tokens, **options
    )


@pytest.mark.parametrize("parts", CHATS.values(), ids=CHATS.keys())
def test_answer_equals_the_reference(tiny_server: Server, tiny_reference: Reference, parts: tuple[Part, ...]) -> None:
    messages, images = reference_messages(*parts)
    expected = tiny_reference.complete(messages, images, max_tokens=12)
    answer = ask(tiny_server, parts)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == tiny_reference.inputs(messages, images)["input_ids"].shape[1]


def test_stream_is_the_same_answer_in_pieces(tiny_server: Server) -> None:
    parts = CHATS["two images"]
    whole = ask(tiny_server, parts)
    chunks = list(ask(tiny_server, parts, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None


def test_eight_concurrent_requests_answer_as_one_alone(tiny_server: Server) -> None:
    chats = [(random_image(64 + 16 * number, 96, 100 + number), "What is it?") for number in range(8)]
    alone = [ask(tiny_server, chat).choices[0].message.content for chat in chats]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda chat: ask(tiny_server, chat).choices[0].message.content, chats))
    assert together == alone


def test_repeated_request_recomputes_only_the_last_block(tiny_server: Server) -> None:  # B3, B4
    parts = (random_image(160, 160, 20), "What is in this image?")
    before = tiny_server.settled("saccade_encoded_items_total")
    first = ask(tiny_server, parts, max_tokens=1)
    assert tiny_server.settled("saccade_encoded_items_total") == before + 1
    second = ask(tiny_server, parts, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens < BLOCK_SIZE
    length = second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == BLOCK_SIZE * ((length - 1) // BLOCK_SIZE)
    assert tiny_server.settled("saccade_encoded_items_total") == before + 1


def test_another_image_of_the_same_size_shares_no_block_past_its_start(tiny_server: Server) -> None:  # E7
    question = "What is in this image?"
    ask(tiny_server, (random_image(128, 128, 30), question), max_tokens=1)
    other = ask(tiny_server, (random_image(128, 128, 31), question), max_tokens=1)
    first_placeholder = 4  # <|im_start|> user \n <|vision_start|>
    assert other.usage.prompt_tokens_details.cached_tokens <= BLOCK_SIZE * (first_placeholder // BLOCK_SIZE)


def test_seed_makes_sampling_reproducible(tiny_server: Server) -> None:
    parts = (random_image(96, 96, 40), "Tell me.")
    texts = [ask(tiny_server, parts, temperature=1.0, seed=seed).choices[0].message.content for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_stop_string_ends_the_answer_before_it(tiny_server: Server) -> None:
    parts = CHATS["one image"]
    whole = ask(tiny_server, parts, max_tokens=12).choices[0].message.content
    stop = whole[4:6]
    answer = ask(tiny_server, parts, max_tokens=12, stop=[stop]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
