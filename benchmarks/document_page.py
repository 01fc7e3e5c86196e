"""What a page costs a reader of documents: PaddleOCR-VL's shape with random weights, on this machine's CPU.

    OMP_NUM_THREADS=2 python benchmarks/document_page.py [--size 1000x1400] [--tokens 200] [--dtype bfloat16]

Prints the seconds from the decoded page to its patches, to the first token (the tower, then the prompt), and of each
further token; the seconds of all cores, which other work on the machine lengthens less; and the process's memory. The
engine runs in this process: no gateway, no wire, no model's files. A page is one region, as the pipeline sends it; it
cuts most pages into ten or more, which have fewer pixels together.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.models.family import ImageOptions
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

FAMILY = "paddleocr_vl"
CONFIG = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": FAMILY, "vision_config": {},
    "image_token_id": 100295, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
"""All sizes are the release's, which the family has as defaults."""

LIMITS = ImageOptions(min_pixels=112_896, max_pixels=1_003_520)
"""What PaddleOCR's pipeline sends with every region."""


class Times(NamedTuple):
    """Seconds of the clock, and of this process on all cores."""

    wall: float
    cpu: float


def now() -> Times:
    """Return the present times."""
    return Times(time.perf_counter(), time.process_time())


def page(size: tuple[int, int]) -> tuple[MediaItem, float]:
    """Return random pixels of *size* (width, height) as the wire has them, and the seconds that they took."""
    width, height = size
    layout = models.load_layout(FAMILY)(CONFIG, {})
    settings = layout.settings_for(LIMITS)
    rgb = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    began = time.perf_counter()
    shape = layout.image(width, height, settings)
    patches = np.empty(shape.pixel_shape, np.uint8)
    models.load_pixels(FAMILY)(settings).write_pixels(rgb, shape, patches)
    seconds = time.perf_counter() - began
    item = MediaItem(
        modality="image",
        content_hash=bytes(32),
        grid=shape.grid,
        spans=(Span(8, shape.num_tokens),),
        pixel_shape=shape.pixel_shape,
        inline=patches.tobytes(),
    )
    return item, seconds


def measure(engine: Engine, item: MediaItem, tokens: int) -> tuple[Times, Times]:
    """Return the times to the first token, and those of each further one."""
    prompt = [*range(10, 18), *[CONFIG["image_token_id"]] * item.spans[0].length, *range(20, 26)]
    sampling = SamplingParams(max_tokens=tokens, temperature=0)
    engine.requests.submit(0, EngineRequest(request_id="page", token_ids=prompt, sampling=sampling, media=(item,)))
    began, times = now(), list[Times]()
    while engine.has_work:
        frame = engine.step().get(0)
        times += [now() for delta in frame.deltas for _ in delta.token_ids] if frame else []
    first, last, further = times[0], times[-1], len(times) - 1
    return (
        Times(first.wall - began.wall, first.cpu - began.cpu),
        Times((last.wall - first.wall) / further, (last.cpu - first.cpu) / further),
    )


def main() -> None:
    """Measure one page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1000x1400")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("config.json", CONFIG), ("preprocessor_config.json", {})):
            (Path(folder) / name).write_text(json.dumps(content))
        began = time.perf_counter()
        config = EngineConfig(
            folder, "page", device="cpu", dtype=arguments.dtype, load_format="dummy", max_num_seqs=1, max_model_len=8192
        )
        engine = start(config, lambda *_: None)
        ready = time.perf_counter() - began
    item, pixels = page((width, height))
    first, further = measure(engine, item, arguments.tokens)
    memory = psutil.Process().memory_info().rss / (1 << 30)
    num_tokens = item.spans[0].length
    print(f"start {ready:.1f} s  {width}x{height}: {np.prod(item.grid)} patches, {num_tokens} tokens")
    print(f"pixels {pixels:.3f} s  first token {first.wall:.1f} s ({first.cpu:.1f} s of cores)")
    print(f"then {further.wall * 1000:.0f} ms a token ({further.cpu * 1000:.0f} ms of cores)")
    whole = pixels + first.wall + further.wall * (arguments.tokens - 1)
    print(f"a page of {arguments.tokens} tokens: {whole:.1f} s  memory {memory:.2f} GiB")


if __name__ == "__main__":
    main()
