"""The checks: backends, graphs and operations against plain PyTorch, no wait in the encoder, one context a rank.

A library for GPUs may raise anything, and the other checks go on.
"""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.plan import FAILED, NOT_RUN, PASSED, Row
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.subject import Subject
from saccade.engine.config import EngineConfig
from saccade.engine.executor import decode_graphs
from saccade.engine.executor.encoder_graphs import refusal
from saccade.engine.executor.execution import decoder_workload, tower_workload
from saccade.engine.startup import start
from saccade.errors import StartupError
from saccade.nn import ops
from saccade.nn.backends import PLAIN, load_backend, load_vision_backend
from saccade.nn.context import KvCache
from saccade.nn.delta_rule import Gates
from saccade.nn.rope import cos_sin, cos_sin_pairs

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference, as a part of the largest value of plain PyTorch."""

ROWS = 5
EXPERTS, CHOICES, WIDTH, TOKENS = 16, 4, 256, 40


def operations(device: torch.device, device_type: str = "cuda") -> Iterator[Row]:
    """Compare each operation that has a version for *device_type* with its plain twin, on *device*."""
    for key, module in {**ops.FASTER, **ops.OF_STATES}.items():
        name, own_type, dtype = key
        if own_type != device_type:
            continue
        label = f"{name}, {module.rpartition('.')[2]}, {str(dtype).removeprefix('torch.')}"
        inputs = [own for of_operation, own in INPUTS if of_operation == name]
        if not inputs:
            yield Row(label, NOT_RUN, "benchmarks.gpu.checks has no input for it")
            continue
        fast, plain = getattr(ops.resolve(device_type, dtype, {key: module}), name), getattr(ops.PLAIN, name)
        if fast is plain:
            yield Row(label, NOT_RUN, "it cannot be imported; the log says why")
            continue
        for own in inputs:
            expected = _result(plain, own(device, dtype))
            yield compared(label, partial(_result, fast, own(device, dtype)), expected, TOLERANCES[dtype])


def _result(operation: Callable[..., Any], arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return all values of an operation's result, and of the cache that it writes to."""
    result = operation(*arguments)
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, ops.PackedLinear):
        return result.add_to(arguments[0].clone(), arguments[0])
    if isinstance(result, tuple) and isinstance(result[1], torch.Tensor):
        return torch.cat([part.flatten().double() for part in result])
    queries, own = result
    caches = [part for cache in arguments if isinstance(cache, KvCache) for part in (cache.keys, cache.values)]
    return torch.cat([part.flatten() for part in (queries, *own, *caches)])


def states_of_proposals(device: torch.device, device_type: str = "cuda") -> Iterator[Row]:
    """Let each kernel of the delta rule write a sequence's last state to its own row, and to a fresh one.

    FlashInfer asks for fresh rows, but a sequence goes on from the row that it began with.
    """
    for key, module in ops.OF_STATES.items():
        operation, own_type, dtype = key
        if own_type != device_type:
            continue
        label = f"{operation}, {module.rpartition('.')[2]}: the last state over the first"
        rule = ops.resolve(device_type, dtype, {key: module}).gated_delta_rule
        if rule is ops.PLAIN.gated_delta_rule:
            yield Row(label, NOT_RUN, "it cannot be imported; the log says why")
        else:
            yield over_the_first(label, rule, device, dtype)


def over_the_first(label: str, rule: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> Row:
    """Compare outputs and states of *rule* with its own over fresh rows."""
    *tokens, states, rows, lengths, trail = _proposals(device, dtype)
    states = torch.randn(states.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    fresh = trail.clone()
    fresh[:, -1] = torch.arange(len(states), len(states) + len(rows), device=device)

    def result(trail: torch.Tensor) -> torch.Tensor:
        own = torch.cat((states, states[: len(rows)]))
        output = rule(*tokens, own, rows, lengths, trail)
        return torch.cat((output.flatten(), own[trail].flatten()))

    try:
        expected = result(fresh)
    except Exception as error:
        return failure(label, error)
    return compared(label, lambda: result(trail), expected)


def _experts(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=dtype) * shape[-1] ** -0.5

    # Some ids belong to another rank.
    scores = torch.rand(TOKENS, EXPERTS + 2, generator=draw, device=device)
    weights, ids = scores.topk(CHOICES, -1)
    inputs = torch.randn(TOKENS, WIDTH, generator=draw, device=device).to(dtype)
    return inputs, random(EXPERTS, 2 * WIDTH, WIDTH), random(EXPERTS, WIDTH, WIDTH), ids, weights


def _cached_heads(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    draw = torch.Generator(device).manual_seed(0)
    heads, size = 12, 128
    qkv = torch.randn(TOKENS, heads, size, generator=draw, device=device).to(dtype)
    weight = torch.rand(heads - 2, size, generator=draw, device=device).to(dtype)
    rotation = cos_sin(torch.rand(TOKENS, size // 2, generator=draw, device=device) * 100, dtype)
    keys, values = torch.zeros(2, TOKENS, 16, 2, size, dtype=dtype, device=device)
    slots = torch.randperm(16 * TOKENS, generator=draw, device=device)[:TOKENS]
    return qkv, 2, weight, 1e-6, rotation, KvCache(keys, values), slots


def _gated_activation(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(TOKENS, 2 * WIDTH, generator=draw, device=device).to(dtype), ops.SILU


def _rotary_pairs(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Queries and keys next to values, as in a vision encoder."""
    draw = torch.Generator(device).manual_seed(0)
    heads = torch.randn(TOKENS, 48, 72, generator=draw, device=device).to(dtype)
    return heads[:, :32], cos_sin_pairs(torch.rand(TOKENS, 36, generator=draw, device=device) * 100)


def _softmax_top_k(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Logits that differ, so that no two choices are right."""
    scores = torch.arange(128, device=device).repeat(TOKENS, 1).roll(3, -1)
    return (scores / 32).to(dtype), 8, True


def _rms_norm(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """With a weight in float32, which torch's own kernel does not take."""
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=draw, device=device).to(dtype)
    return x, torch.rand(WIDTH, generator=draw, device=device), 1e-6


def _gated_norm(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    draw = torch.Generator(device).manual_seed(0)
    heads, gates = torch.randn(2, TOKENS, 4, 128, generator=draw, device=device).to(dtype)
    return heads, gates.flatten(1), torch.rand(128, generator=draw, device=device), 1e-6


def _pack_linear(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    draw = torch.Generator(device).manual_seed(0)
    shapes = (WIDTH, WIDTH), (WIDTH,)
    return tuple(torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes)


def _gated_delta_rule(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """A prompt, and a single token; both begin with empty states, since kernels may have them in another layout."""
    draw = torch.Generator(device).manual_seed(0)
    lengths, heads, size = (1, TOKENS), 4, 128
    # Releases have more heads of values than of keys.
    q, k, v = (
        torch.randn(sum(lengths), own, size, generator=draw, device=device).to(dtype)
        for own in (heads // 2, heads // 2, heads)
    )
    a, b = (torch.randn(sum(lengths), heads, generator=draw, device=device).to(dtype) for _ in range(2))
    rate, bias = torch.randn(2, heads, generator=draw, device=device)
    states = torch.zeros(len(lengths), heads, size, size, device=device)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=device)
    return q, k, v, Gates(rate, bias, a, b), states, rows, lengths


def _single_tokens(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Heads and gates are parts of wider rows, as a layer has them."""
    *tokens, _, _, _ = _gated_delta_rule(device, dtype)
    q, k, v, gates = tokens
    count, wide = 3, (q, k, v, gates.a_NH, gates.b_NH)
    q, k, v, a, b = (part[:count].repeat(1, 2, *(1,) * (part.dim() - 2))[:, : part.shape[1]] for part in wide)
    states = torch.zeros(count, *v.shape[1:], k.shape[-1], device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    return q, k, v, Gates(gates.rate_log_H, gates.bias_H, a, b), states, rows, (1,) * count


def _proposals(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Three proposals behind the last token of each of two sequences."""
    length = 4
    *tokens, _, rows, _ = _gated_delta_rule(device, dtype)
    q, k, v, gates = tokens
    own = slice(2 * length)
    gates = Gates(gates.rate_log_H, gates.bias_H, gates.a_NH[own], gates.b_NH[own])
    states = torch.zeros(2 * length, *v.shape[1:], k.shape[-1], device=device)
    trail = torch.arange(2, 2 * length, device=device).view(2, length - 1)
    trail = torch.cat((trail, rows.long().unsqueeze(1)), 1)
    return q[own], k[own], v[own], gates, states, rows, (length,) * 2, trail


def _causal_conv(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """A single token and a prompt, after other tokens."""
    draw = torch.Generator(device).manual_seed(0)
    lengths, taps = (1, TOKENS), 4
    x = torch.randn(sum(lengths), WIDTH, generator=draw, device=device).to(dtype)
    states = torch.randn(len(lengths), taps - 1, WIDTH, generator=draw, device=device).to(dtype)
    weight = torch.randn(taps, WIDTH, generator=draw, device=device)
    return x, weight, states, torch.arange(len(lengths), device=device), lengths, ops.SILU


INPUTS: tuple[tuple[str, Callable[[torch.device, torch.dtype], tuple[Any, ...]]], ...] = (
    ("experts", _experts),
    ("cached_heads", _cached_heads),
    ("gated_activation", _gated_activation),
    ("rotary_pairs", _rotary_pairs),
    ("softmax_top_k", _softmax_top_k),
    ("rms_norm", _rms_norm),
    ("gated_norm", _gated_norm),
    ("pack_linear", _pack_linear),
    ("gated_delta_rule", _gated_delta_rule),
    ("gated_delta_rule", _single_tokens),
    ("gated_delta_rule", _proposals),
    ("causal_conv", _causal_conv),
)


def decoder_backends(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Compare each backend of the text decoder that can compute the model, and its graphs, with plain PyTorch."""
    workload = decoder_workload(subject.config, subject.model)
    expected = subject.decoding(load_backend(PLAIN, workload), ROWS, with_graphs=False)()
    for name in scale.decoders:
        if name != PLAIN:
            yield compared(f"decoder, {name}", partial(_decoded, subject, name), expected)
        yield _decode_graphs(subject, name, expected)


def graphs_refusal(subject: Subject, name: str) -> str | None:
    """Return why decodes by the backend *name* cannot be captured; None if they can."""
    network = subject.model.network
    try:
        backend = load_backend(name, decoder_workload(subject.config, subject.model))
    except StartupError as error:
        return error.message
    device = network.device if subject.capture is None else torch.device("cuda")
    reason = decode_graphs.refusal(subject.model.module, backend, device, network.dtype)
    return None if reason is None else f"--cuda-graphs {reason}"


def _decode_graphs(subject: Subject, name: str, expected: torch.Tensor) -> Row:
    label = f"decoder, {name}, CUDA graphs"
    if (reason := graphs_refusal(subject, name)) is not None:
        return Row(label, NOT_RUN, reason)
    backend = load_backend(name, decoder_workload(subject.config, subject.model))
    return compared(label, lambda: subject.decoding(backend, ROWS, with_graphs=True)(), expected)


def _decoded(subject: Subject, name: str) -> torch.Tensor:
    backend = load_backend(name, decoder_workload(subject.config, subject.model))
    return subject.decoding(backend, ROWS, with_graphs=False)()


def _encoded(subject: Subject, name: str, count: int) -> torch.Tensor:
    return subject.prepared(load_vision_backend(name, tower_workload(subject.model)), count)()


def vision_backends(subject: Subject, scale: Scale) -> Iterator[Row]:
    """Compare each backend of the vision encoder, and its graphs, with plain PyTorch; and look for waits."""
    most = len(subject.images)
    counts = sorted({1, min(2, most), most})
    plain = load_vision_backend(PLAIN, tower_workload(subject.model))
    for name in scale.towers:
        for count in counts:
            expected = subject.prepared(plain, count)()
            if name != PLAIN:
                call = partial(_encoded, subject, name, count)
                yield compared(f"vision encoder, {name}, {count} images", call, expected)
            yield _encoder_graphs(subject, name, count, expected)
        yield waits(subject, name)


def encoder_refusal(subject: Subject, name: str) -> str | None:
    """Return why the graphs of the vision encoder cannot be made with the backend *name*; None if they can."""
    try:
        backend = load_vision_backend(name, tower_workload(subject.model))
    except StartupError as error:
        return error.message
    if subject.capture is not None and backend.captures_packed:
        return None
    return refusal(subject.model.network, backend, cuts_encoder=False)


def _encoder_graphs(subject: Subject, name: str, count: int, expected: torch.Tensor) -> Row:
    label = f"vision encoder, {name}, {count} images, CUDA graphs"
    if (reason := encoder_refusal(subject, name)) is not None:
        return Row(label, NOT_RUN, reason)
    backend = load_vision_backend(name, tower_workload(subject.model))

    def encode() -> torch.Tensor:
        outcome = subject.encoder(backend, with_graphs=True).encode(subject.images[:count])
        if outcome.failed:
            raise RuntimeError("the encoder failed; its log says why")
        return torch.cat([outcome.features[image.output_id] for image in subject.images[:count]])

    return compared(label, encode, expected)


def waits(subject: Subject, name: str) -> Row:
    """Have torch raise where the host waits for the device within `encode`."""
    label = f"vision encoder, {name}: the host does not wait"
    if subject.model.network.device.type != "cuda":
        return Row(label, NOT_RUN, "this needs a GPU")
    try:
        call = subject.prepared(load_vision_backend(name, tower_workload(subject.model)), len(subject.images))
        call()  # what is compiled at the first call may wait
        torch.cuda.set_sync_debug_mode("error")
        call()
    except Exception as error:
        return failure(label, error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row(label, PASSED)


def contexts(config: EngineConfig) -> Row:
    """Start two ranks, and see whether the second has a context on its own GPU alone."""
    label = "one CUDA context a rank"
    torch.zeros(1, device="cuda")
    before = _contexts()
    if not before:
        return Row(label, NOT_RUN, "nvidia-smi lists no processes here")
    try:
        engine = start(config, lambda *_: None)
    except Exception as error:
        return Row(label, FAILED, line(error))
    try:
        added = _contexts() - before
    finally:
        engine.close()
    return Row(label, PASSED if sorted(added.values()) == [1] else FAILED, f"added by the second rank: {dict(added)}")


def _contexts() -> Counter[str]:
    """Return the number of processes on each GPU that has any."""
    command = ["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return Counter(line.strip() for line in listed.stdout.splitlines() if line.strip())


def compared(
    name: str, call: Callable[[], torch.Tensor], expected: torch.Tensor, tolerance: float | None = None
) -> Row:
    """Return whether *call* gives *expected*, within *tolerance*, by default that of its dtype."""
    try:
        actual = call()
    except Exception as error:
        return failure(name, error)
    largest = float(expected.float().abs().max())
    difference = float((actual.float() - expected.float()).abs().max()) / largest
    # A NaN is not at most anything.
    result = PASSED if difference <= (tolerance or TOLERANCES[expected.dtype]) else FAILED
    return Row(name, result, f"differs by {difference:.1e} of the largest value")


def failure(name: str, error: Exception) -> Row:
    """Return the row of a call that raised: a refusal, or too little memory, is no failure."""
    is_refusal = isinstance(error, StartupError | torch.OutOfMemoryError)
    return Row(name, NOT_RUN if is_refusal else FAILED, line(error))


def line(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(str(error).split())[:300]
