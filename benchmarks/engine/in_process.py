"""Whole requests by an engine in this process, without gateway and wire: two commits can be measured in turn.

    python -m benchmarks.engine.shape_2b DIR
    PYTHONPATH=TREE/src python benchmarks/engine/in_process.py DIR

DIR holds a Qwen3-VL of the 2B release's shape, which the first line makes. bfloat16, two threads, every row twice, the
faster counts. Prints seconds for all answers of a row, the median decode step, and output tokens per second.
"""

import sys
import time

import numpy as np

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

ROWS = ((1, (448, 448), 24), (4, (448, 448), 24), (1, (1280, 960), 8), (1, None, 24), (4, None, 24))
"""Clients, size of their image, tokens of an answer."""

IMAGE_TOKEN = 413
TEXT_TOKENS = 20


def request(number: int, size: tuple[int, int] | None, num_tokens: int) -> EngineRequest:
    """Return a request that shares no image with another *number*."""
    token_ids, media = [1, 2, 3], ()
    if size is not None:
        rows, columns = size[1] // 16, size[0] // 16
        num_patches = rows * columns
        pixels = np.random.default_rng(number).integers(0, 256, num_patches * 768, dtype=np.uint8).tobytes()
        item = MediaItem(
            modality="image",
            content_hash=number.to_bytes(32, "little"),
            grid=(1, rows, columns),
            spans=(Span(3, num_patches // 4),),
            pixel_shape=(num_patches, 768),
            inline=pixels,
        )
        token_ids, media = token_ids + [IMAGE_TOKEN] * (num_patches // 4), (item,)
    token_ids += [number % 100] * TEXT_TOKENS
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0)
    return EngineRequest(request_id=str(number), token_ids=token_ids, sampling=sampling, media=media)


def main() -> None:
    """Measure the model that the first argument names."""
    config = EngineConfig(
        sys.argv[1], "benchmark", device="cpu", dtype="bfloat16", max_num_seqs=8, threads=2,
        enable_prefix_caching=False, kv_cache_bytes=1 << 29,
    )  # fmt: skip
    began = time.perf_counter()
    engine = startup.start(config, lambda *_: None)
    print(f"start {time.perf_counter() - began:.1f} s")
    serial = 0
    for num_clients, size, num_tokens in (ROWS[0], *ROWS):
        times = []
        for _ in range(2):
            for _ in range(num_clients):
                serial += 1
                engine.requests.submit(0, request(serial, size, num_tokens))
            steps, began = [], time.perf_counter()
            while engine.has_work:
                step_began = time.perf_counter()
                engine.step()
                steps.append(time.perf_counter() - step_began)
            times.append((time.perf_counter() - began, float(np.median(steps[-num_tokens // 2 :]))))
        seconds, step_seconds = min(times)
        shown = "text" if size is None else f"{size[0]}x{size[1]}"
        rate = num_clients * num_tokens / seconds
        print(
            f"{num_clients} x {shown}: {seconds:.2f} s, step {1000 * step_seconds:.0f} ms, {rate:.1f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
