"""Sampling parameters that cannot be: refused by the field's name, before anything is computed."""

from typing import Any, cast

import pytest
from tables import table

from saccade.engine.core.request_validation import MediaMemory, RequestValidator
from saccade.errors import ContextLengthExceeded, InvalidValue
from saccade.models.positions import MultimodalPositions
from saccade.models.spec import ModelSpec
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

NAN, INF = float("nan"), float("inf")
PLACEHOLDER = 9


class Spec:
    """A model of ten tokens that is asked about no image."""

    vocab_size = 10
    placeholder_of = {"image": PLACEHOLDER}  # noqa: RUF012
    placeholder_token_ids = (PLACEHOLDER,)

    def positions(self, media: Any) -> MultimodalPositions:
        """Plain ones."""
        return MultimodalPositions([])


def admit(num_samples: int = 1, **params: Any) -> None:
    sampling = SamplingParams(**{"max_tokens": 5, **params})
    asked = EngineRequest(request_id="a", token_ids=[1, 2], sampling=sampling, num_samples=num_samples)
    RequestValidator(cast(ModelSpec, Spec()), b"", 100).validated(0, asked, 1)


@table(
    "num_prompt, delta, answer",
    [(2, 0, 4), (2, -3, 5), (5, 0, 1), (8, -3, 1), (2, 1, 3), (6, 0, None), (9, -3, None)],
)
def test_an_answer_ends_at_the_last_position(num_prompt: int, delta: int, answer: int | None) -> None:
    """The context has 100 tokens and six positions; an image makes *delta* positions less than tokens, or more."""

    class Shared(Spec):
        def positions(self, media: Any) -> MultimodalPositions:
            positions = MultimodalPositions([])
            positions.delta = delta
            return positions

    validator = RequestValidator(cast(ModelSpec, Shared()), b"", 100, max_positions=6)
    asked = EngineRequest(request_id="a", token_ids=[1] * num_prompt, sampling=SamplingParams(max_tokens=5))
    if answer is None:
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 6 tokens"):
            validator.validated(0, asked, 1)
    else:
        assert validator.validated(0, asked, 1).max_num_tokens == num_prompt + answer


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"num_samples": 0}),
    ("n", {"num_samples": 129}),
    *(("min_p", {"min_p": value}) for value in (-0.1, 1.1, NAN)),
    *(("presence_penalty", {"presence_penalty": value}) for value in (-2.1, 2.1, NAN)),
    *(("frequency_penalty", {"frequency_penalty": value}) for value in (-2.1, 2.1, INF)),
    *(("repetition_penalty", {"repetition_penalty": value}) for value in (0.0, -1.0, INF, NAN, 1e-30)),
    *(("logit_bias", {"logit_bias": bias}) for bias in ({10: 1.0}, {-1: 1.0}, {1: NAN}, {1: 101.0}, {1: -INF})),
    *(("allowed_token_ids", {"allowed_token_ids": ids}) for ids in ((1, 10), (-1,), (PLACEHOLDER,))),
    ("allowed_token_ids", {"allowed_token_ids": (3, PLACEHOLDER), "stop_token_ids": (3,), "min_tokens": 1}),
    *(("min_tokens", {"min_tokens": value}) for value in (-1, 6)),
    ("min_tokens", {"min_tokens": 1, "stop_token_ids": tuple(range(9))}),
    *(("top_logprobs", {"num_logprobs": value}) for value in (-1, 21)),
    *(("prompt_logprobs", {"num_prompt_logprobs": value}) for value in (-1, 21)),
]


@table(("param", "params"), REFUSED)
def test_invalid_parameter_is_refused_by_name(param: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        admit(**params)
    assert caught.value.param == param


class ImageSpec(Spec):
    """Images of a token a patch, whose features have ten values."""

    def item_tokens(self, grid: tuple[int, int, int], original_size: Any = None) -> int:
        return grid[0] * grid[1] * grid[2]

    def encode_cost(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * grid[1] * grid[2]

    def encoder_output_values(self, grid: tuple[int, int, int], original_size: Any = None) -> int:
        return 10 * grid[0] * grid[1] * grid[2]

    def pixel_shape(self, grid: tuple[int, int, int], modality: str = "image") -> tuple[int, ...]:
        return (grid[0] * grid[1] * grid[2],)

    def span_lengths(self, grid: tuple[int, int, int], modality: str) -> None:
        return None


@pytest.mark.parametrize(
    ("modality", "grid", "flag"),
    [
        ("image", (1, 2, 4), None),
        ("image", (1, 3, 3), "--encode-budget-patches"),
        ("video", (4, 2, 4), None),
        ("video", (1, 3, 3), "--encode-budget-patches"),
        ("video", (5, 2, 4), "--encoder-cache-bytes"),
    ],
)
def test_media_over_gpu_memory_are_refused_by_flag(modality: str, grid: tuple[int, int, int], flag: str | None) -> None:
    """There is memory for images and frames of 8 patches, and for features of 32, with two bytes a value."""
    spec = ImageSpec()
    spec.placeholder_of = {"image": PLACEHOLDER, "video": PLACEHOLDER}
    num_tokens = spec.item_tokens(grid)
    spans = (Span(0, num_tokens),)
    item = MediaItem(modality=modality, content_hash=bytes(32), grid=grid, spans=spans, pixel_shape=(num_tokens,))
    sampling = SamplingParams(max_tokens=5)
    asked = EngineRequest(request_id="a", token_ids=[PLACEHOLDER] * num_tokens, sampling=sampling, media=(item,))
    limits = MediaMemory(num_patches=8, num_bytes=32 * 10 * 2, itemsize=2)
    subject = RequestValidator(cast(ModelSpec, spec), b"", 100, limits)
    if flag is None:
        subject.validated(0, asked, 1)
        return
    with pytest.raises(InvalidValue, match=flag) as caught:
        subject.validated(0, asked, 1)
    assert caught.value.param == "media[0]"


def test_values_at_the_limits_are_admitted() -> None:
    admit(
        num_samples=128, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01,
        logit_bias={0: 100.0, PLACEHOLDER: -100.0}, allowed_token_ids=(3, PLACEHOLDER), min_tokens=5,
        stop_token_ids=(0, 10**6, -1), num_logprobs=20, num_prompt_logprobs=0,
    )  # fmt: skip


def test_requests_without_a_seed_draw_the_same_after_each_start_with_one() -> None:
    def seeds(seed: int | None) -> list[int]:
        validator = RequestValidator(cast(ModelSpec, Spec()), b"", 100, seed=seed)
        requests = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, seed=7), SamplingParams(max_tokens=5)]
        asked = [EngineRequest(request_id="a", token_ids=[1, 2], sampling=one, num_samples=1) for one in requests]
        return [validator.validated(0, one, 1).request_seed for one in asked]

    first, own, last = seeds(3)
    assert seeds(3) == [first, 7, last]
    assert own == 7
    assert len({first, last, *seeds(4), *seeds(None)}) == 7
