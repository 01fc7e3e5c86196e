"""The parts of the benchmark, the most important first. Each one yields its rows, or refuses with a reason."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from benchmarks.engine.shape_2b import BUNDLED
from benchmarks.gpu import checks, timings
from benchmarks.gpu.attention import attention
from benchmarks.gpu.ceilings import ceilings
from benchmarks.gpu.experts_memory import experts_memory
from benchmarks.gpu.kernels_of_steps import kernels_of_steps
from benchmarks.gpu.plan import FAILED, PASSED, Part, Row
from benchmarks.gpu.replays import replays
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.served import served
from benchmarks.gpu.shapes import FORMATS, quantised_parts
from benchmarks.gpu.subject import Subject, load
from saccade.engine import startup, warmup
from saccade.engine.config import EngineConfig
from saccade.engine.executor.execution import decoder_workload, prepare_execution
from saccade.engine.loop import Engine
from saccade.identity.content import HASH_BYTES
from saccade.nn.backends import PLAIN, load_backend
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear
from saccade.nn.ops import PlainLinear
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

TEXT_TOKENS = 30
ROUNDED_TOLERANCE = 0.25
"""Of the largest hidden state, after all layers of kernels that round activations to eight or four bits."""

GIB = 1 << 30
PREDICTED = (
    "AIConfigurator predicts for Qwen3-VL-8B with one image of 1280 x 960 pixels: on an H100 17.3 ms to encode it, "
    "92 ms to the first token, 6.4 ms a token; on an H200 16.2, 89 and 5.1; on a B200 9.7, 65 and 3.6."
)


class Refused(Exception):
    """A part cannot run here; the text is the reason."""


class Setting(NamedTuple):
    """How large the parts are, a folder for the files of random models, and the model to take instead, if any."""

    scale: Scale
    folder: Path
    model: str | None = None

    def config(self, size: str) -> EngineConfig:
        """Return the configuration of the model *size*."""
        return self.scale.config(size, self.folder, self.model)

    def load(self, size: str, patches: tuple[int, ...] = ()) -> Subject:
        """Load the model *size*, with images of *patches*."""
        return load(self.config(size), patches, self.scale.capture)


def _ceilings(setting: Setting) -> Iterator[Row]:
    return ceilings(setting.scale)


def _attention(setting: Setting) -> Iterator[Row]:
    return attention(setting.scale)


def _replays(setting: Setting) -> Iterator[Row]:
    return replays(setting.load("2b"), setting.scale)


def _kernels_of_steps(setting: Setting) -> Iterator[Row]:
    return kernels_of_steps(setting.load("8b", (setting.scale.photo,)), setting.scale)


def _served(setting: Setting) -> Iterator[Row]:
    return served(setting.config("8b"), setting.scale, setting.folder.parent / "served")


def _answers(setting: Setting) -> Iterator[Row]:
    """Answer with the bundled model on this device and on the CPU, in float32, greedily."""
    device = setting.scale.device
    length = setting.scale.answer
    expected = _answered(_small(device="cpu"), length)
    for name in setting.scale.decoders:
        if name == "flashinfer":
            continue  # it does not compute in float32
        label = f"answers of the bundled model, {name} on {device}"
        try:
            tokens = _answered(_small(device=device, attention_backend=name), length)
        except Exception as error:
            yield Row(label, FAILED, checks.line(error))
            continue
        num_equal = sum(one == other for one, other in zip(tokens, expected, strict=True))
        yield Row(label, PASSED if tokens == expected else FAILED, f"{num_equal} of {len(expected)} equal the CPU's")


def _small(**settings: str) -> EngineConfig:
    return EngineConfig(str(BUNDLED), "bundled", dtype="float32", num_blocks=64, **settings)  # type: ignore[arg-type]


def _answered(config: EngineConfig, length: int) -> list[list[int]]:
    """Return *length* token ids of two answers: about text, and about an image."""
    engine = startup.start(config, lambda *_: None)
    try:
        return [_run(engine, [request]) for request in (_text(length), _with_image(engine, length))]
    finally:
        engine.close()


def _text(length: int) -> EngineRequest:
    ids = np.random.default_rng(2).integers(0, 400, TEXT_TOKENS).tolist()
    sampling = SamplingParams(max_tokens=length, temperature=0)
    return EngineRequest(request_id="text", token_ids=ids, sampling=sampling)


def _with_image(engine: Engine, length: int) -> EngineRequest:
    spec, text = engine.validator.spec, _text(length)
    grid = spec.square_grid(64)
    shape, num_tokens = spec.pixel_shape(grid), spec.item_tokens(grid)
    pixels = np.random.default_rng(3).integers(0, 256, shape, np.uint8).tobytes()
    item = MediaItem(
        modality="image", content_hash=bytes(HASH_BYTES), grid=grid, spans=(Span(1, num_tokens),), pixel_shape=shape,
        inline=pixels,
    )  # fmt: skip
    ids = [text.token_ids[0], *[spec.placeholder_of["image"]] * num_tokens, *text.token_ids[1:]]
    return EngineRequest(request_id="image", token_ids=ids, sampling=text.sampling, media=(item,))


def _run(engine: Engine, requests: Sequence[EngineRequest]) -> list[int]:
    """Return the token ids of all answers. Raises RuntimeError if a request fails."""
    for request in requests:
        engine.requests.submit(0, request)
    tokens: list[int] = []
    while engine.has_work:
        for frame in engine.step().values():
            for delta in frame.deltas:
                if delta.failure is not None:
                    raise RuntimeError(f"a request failed: {engine.cause or delta.failure.message}")
                tokens += delta.token_ids
    return tokens


def _kernels(setting: Setting) -> Iterator[Row]:
    """Compare every operation, backend and graph with its plain twin."""
    device = torch.device(setting.scale.device)
    yield from checks.operations(device)
    yield from checks.states_of_proposals(device)
    subject = setting.load("2b", setting.scale.patches)
    yield from checks.decoder_backends(subject, setting.scale)
    cached = replace(subject, config=replace(subject.config, kv_cache_dtype="fp8"))
    yield from _named("FP8 KV cache: ", checks.decoder_backends(cached, setting.scale))
    yield from checks.vision_backends(subject, setting.scale)


def _experts(setting: Setting) -> Iterator[Row]:
    return experts_memory(setting.scale)


def _start(setting: Setting) -> Iterator[Row]:
    """Start an engine as `saccade serve` does, and encode the largest image: does the memory last?"""
    config, began = setting.config("2b"), time.perf_counter()
    engine = startup.start(config, lambda *_: None)
    try:
        description = engine.description
        backends = f"{description.attention_backend}, {description.mm_encoder_attn_backend}"
        yield Row("start of an engine", f"{time.perf_counter() - began:.1f} s", backends)
        for reason in description.backend_reasons:
            yield Row("why these backends", "", reason)
        yield Row("KV cache", f"{description.num_blocks * description.block_size} tokens")
        limits, spec = engine.validator.media_memory, engine.validator.spec
        grid = startup.largest_grid(spec, limits.num_patches if limits else setting.scale.photo)
        warmup.run_warmup(engine, 1, grid)
        label = f"an image of {spec.encode_cost(grid)} patches, the largest"
        if setting.scale.device == "cuda":
            total, peak = torch.cuda.get_device_properties(0).total_memory, torch.cuda.max_memory_reserved()
            limit = config.gpu_memory_utilization * total
            detail = f"peak {peak / GIB:.1f} GiB, limit {limit / GIB:.1f} GiB of --gpu-memory-utilization"
            yield Row(label, PASSED if peak <= limit else FAILED, detail)
        else:
            yield Row(label, PASSED)
    finally:
        engine.close()


def _small_decodes(setting: Setting) -> Iterator[Row]:
    scale = setting.scale
    yield from timings.decodes(setting.load("2b"), scale, tuple((count, scale.context) for count in scale.rows))


def _large_decodes(setting: Setting) -> Iterator[Row]:
    scale = setting.scale
    yield from timings.decodes(setting.load("8b"), scale, tuple((count, scale.context) for count in scale.rows))


def _small_prompts(setting: Setting) -> Iterator[Row]:
    yield from timings.prompts(setting.load("2b"), setting.scale)


def _large_prompts(setting: Setting) -> Iterator[Row]:
    yield from timings.prompts(setting.load("8b"), setting.scale)


def _encoder(setting: Setting) -> Iterator[Row]:
    yield from timings.encodings(setting.load("8b", (setting.scale.photo,)), setting.scale)


def _long(setting: Setting) -> Iterator[Row]:
    scale = setting.scale
    yield from timings.decodes(setting.load("8b"), scale, ((1, scale.long), (scale.most_rows, scale.deep)))


def _quantised(name: str) -> "Yields":
    def run(setting: Setting) -> Iterator[Row]:
        """Compare and time the same weights: dequantised once, then at each use or by a kernel."""
        scale = setting.scale
        plain = setting.load("8b")
        layers = [module for module in plain.model.module.modules() if isinstance(module, Linear)]
        if not all(isinstance(layer.packed, PlainLinear) for layer in layers):
            raise Refused("the model's weights are in a format of their own: leave out --model")
        parts = quantised_parts(plain.model, FORMATS[name])
        for layer, own in parts.items():
            layer.weight = nn.Parameter(torch.cat([part.dequantised(layer.weight.dtype) for part in own]), False)
            layer.packed = None
        cases = tuple((count, scale.context) for count in scale.rows[:1])
        scale = replace(scale, decoders=(plain.execution.backend.name,))
        backend = load_backend(PLAIN, decoder_workload(plain.config, plain.model))
        expected = plain.decoding(backend, checks.ROWS, with_graphs=False)()
        yield from _named("plain: ", timings.decodes(plain, scale, cases))
        for layer, own in parts.items():
            layer.weight = nn.Parameter(layer.weight.new_empty(0, layer.weight.shape[1]), False)
            layer.hold("weight", own)
        subject = replace(plain, execution=prepare_execution(plain.config, plain.model))
        by_kernel = sum(not isinstance(layer.packed, QuantisedLinear) for layer in parts)
        label = f"{FORMATS[name].name} against its values"
        # Most kernels round activations too.
        tolerance = ROUNDED_TOLERANCE if by_kernel else None
        decode = subject.decoding(backend, checks.ROWS, with_graphs=False)
        row = checks.compared(label, decode, expected, tolerance)
        yield row._replace(detail=f"{by_kernel} of {len(parts)} layers by a kernel; {row.detail}")
        yield from _named(f"{name}: ", timings.decodes(subject, scale, cases))

    return run


def _named(prefix: str, rows: Iterator[Row]) -> Iterator[Row]:
    return (row._replace(name=prefix + row.name) for row in rows)


def _penalties(setting: Setting) -> Iterator[Row]:
    yield from timings.penalties(setting.load("2b"), setting.scale)


def _ahead(setting: Setting) -> Iterator[Row]:
    """Answer through the whole engine, with each step launched after and before the last one is collected."""
    scale = setting.scale
    for is_ahead in (False, True):
        engine = startup.start(replace(setting.config("2b"), async_scheduling=is_ahead), lambda *_: None)
        try:
            for count in scale.rows:
                length = scale.answer * 4
                requests = [msgspec.structs.replace(_text(length), request_id=f"text {row}") for row in range(count)]
                seconds = [timings.seconds_of(lambda: _run(engine, requests)) for _ in range(2)][1]  # noqa: B023
                label = f"{length} tokens of {count} rows, steps launched {'ahead' if is_ahead else 'one by one'}"
                yield Row(label, f"{1000 * seconds / length:.2f} ms a token")
        finally:
            engine.close()


def _ranks(setting: Setting) -> Iterator[Row]:
    if torch.cuda.device_count() < 2:
        raise Refused("this machine has fewer than two GPUs")
    yield checks.contexts(replace(setting.config("2b"), tensor_parallel_size=2, num_blocks=256))


Yields = Callable[[Setting], Iterator[Row]]
PARTS: Mapping[Part, Yields] = MappingProxyType(
    {
        Part("ceilings", "what the card reaches at most", 30): _ceilings,
        Part("answers", "the bundled model answers as on a CPU", 60): _answers,
        Part("attention", "attention at the shapes of real models against float32", 60): _attention,
        Part("replays", "graphs over rows and lengths that change", 60): _replays,
        Part("steps", "where the time of a step goes, of the 8B shape", 90): _kernels_of_steps,
        Part("served", "saccade serve over HTTP, of the 8B shape", 120): _served,
        Part("kernels", "each operation, backend and graph against its plain twin", 150): _kernels,
        Part("start", "an engine starts, and encodes the largest image", 90): _start,
        Part("decode-8b", "decode steps of the 8B shape", 90): _large_decodes,
        Part("decode-2b", "decode steps of the 2B shape", 60): _small_decodes,
        Part("encoder", "an image of 1280 x 960 pixels", 60): _encoder,
        Part("prompts-8b", "a hundred lengths of prompts in a row", 90): _large_prompts,
        Part("long", "one row after 32k tokens, and many after 4k", 90): _long,
        Part("fp8", "steps of FP8 weights", 60): _quantised("fp8"),
        Part("penalties", "rows with penalties", 45): _penalties,
        Part("ahead", "steps launched before the last one is collected", 60): _ahead,
        Part("int4", "steps of INT4 weights", 60): _quantised("int4"),
        Part("nvfp4", "steps of NVFP4 weights", 60): _quantised("nvfp4"),
        Part("experts", "memory of experts, in calls and in a graph", 60): _experts,
        Part("prompts-2b", "a hundred lengths of prompts in a row", 60): _small_prompts,
        Part("ranks", "one CUDA context a rank", 90): _ranks,
    }
)
