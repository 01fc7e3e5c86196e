"""What a page costs a reader of documents: shapes of releases with random weights, on this machine's CPU.

    PYTHONPATH=scripts OMP_NUM_THREADS=2 python -m benchmarks.document_page --out benchmarks/results/document-page.json

A page of A4 is given at the size at which `saccade read` draws it. Measured are the seconds from its pixels to patches,
to the first token (the encoder, then the prompt), and of each further token; the seconds of all cores, which other work
on the machine lengthens less; and the memory of the process at most. Nothing ends the answer before it has all tokens.
The engine runs in this process: no gateway, no wire, no model's files. scripts/first_models.py has the shapes, and
writes the results into docs/.
"""

import argparse
import itertools
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import first_models
import numpy as np

from benchmarks.measured import write
from saccade import models
from saccade.documents.pages import Page, drawn_size
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.models.family import ImageOptions, PageForm
from saccade.protocol.media import ImageLayout, MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

MODELS = ("HuggingFaceTB/SmolVLM-256M-Instruct", "PaddlePaddle/PaddleOCR-VL-1.6", "Qwen/Qwen3-VL-2B-Instruct")
FORMATS: Mapping[str, str | None] = {"bfloat16": None, "int8": "int8", "int4": "int4"}
A4 = Page(Path("a4.pdf"), "", 1, 595, 842, is_drawn=True)
TEXT = range(10, 110)
"""Token ids in place of the question's, and of each mark between the views of an image."""


class Times(NamedTuple):
    """Seconds of the clock, and of this process on all cores."""

    wall: float
    cpu: float

    def since(self, before: "Times") -> "Times":
        """Return the seconds from *before* to these."""
        return Times(self.wall - before.wall, self.cpu - before.cpu)


def now() -> Times:
    """Return the present times."""
    return Times(time.perf_counter(), time.process_time())


def patches_of(model: first_models.FirstModel) -> tuple[ImageLayout, bytes, float]:
    """Return the layout of a page, its patches as the wire has them, and the seconds from random pixels to these."""
    family = models.family_of(model.config)
    width, height = drawn_size(A4, PageForm("").longest_side)
    layout = models.load_layout(family)(model.config, model.preprocessor)
    settings = layout.settings_for(ImageOptions())
    rgb = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    began = time.perf_counter()
    image = layout.image(width, height, settings)
    patches = np.empty(image.pixel_shape, image.pixel_dtype)
    models.load_pixels(family)(settings).write_pixels(rgb, image, patches)
    return image, patches.tobytes(), time.perf_counter() - began


def request(image: ImageLayout, patches: bytes, placeholder: int, number: int, tokens: int) -> EngineRequest:
    """Return the request about page *number*, which no cache has."""
    prompt, spans = [TEXT[0]], list[Span]()
    for part in image.prompt or (image.num_tokens,):
        if isinstance(part, int):
            spans.append(Span(len(prompt), part))
        prompt += [placeholder] * part if isinstance(part, int) else TEXT[:1]
    item = MediaItem(
        modality="image",
        content_hash=number.to_bytes(32, "big"),
        grid=image.grid,
        spans=tuple(spans),
        pixel_shape=image.pixel_shape,
        pixel_dtype=image.pixel_dtype,
        original_size=image.original_size,
        inline=patches,
    )
    sampling = SamplingParams(max_tokens=tokens, temperature=0)
    return EngineRequest(request_id=f"page-{number}", token_ids=[*prompt, *TEXT], sampling=sampling, media=(item,))


def answer(engine: Engine, asked: EngineRequest) -> tuple[Times, Times]:
    """Return the times to the first token, and those of all further ones."""
    engine.requests.submit(0, asked)
    began, times = now(), list[Times]()
    while engine.has_work:
        frame = engine.step().get(0)
        times += [now() for delta in frame.deltas for _ in delta.token_ids] if frame else []
    assert len(times) == asked.sampling.max_tokens
    return times[0].since(began), times[-1].since(times[0])


def measure(name: str, number_format: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the row of a model in a number format: medians of *rounds* pages."""
    (model,) = (one for one in first_models.MODELS if one.name == name)
    image, patches, pixel_seconds = patches_of(model)
    with tempfile.TemporaryDirectory() as folder:
        for file, content in (("config.json", model.config), ("preprocessor_config.json", model.preprocessor)):
            (Path(folder) / file).write_text(json.dumps(content))
        began = time.perf_counter()
        config = EngineConfig(
            folder,
            name,
            device="cpu",
            dtype="bfloat16",
            quantization=FORMATS[number_format],
            load_format="dummy",
            max_num_seqs=1,
            max_model_len=8192,
        )
        engine = start(config, lambda *_: None)
        start_seconds = time.perf_counter() - began
    placeholder = model.config["image_token_id"]
    asked = [request(image, patches, placeholder, number, tokens) for number in range(1, rounds + 1)]
    pages = [answer(engine, one) for one in asked]
    return {
        "model": name,
        "format": number_format,
        "tokens": tokens,
        "start_seconds": round(start_seconds, 1),
        "page": "x".join(map(str, drawn_size(A4, PageForm("").longest_side))),
        "image_tokens": image.num_tokens,
        "pixel_seconds": round(pixel_seconds, 3),
        "page_seconds": round(pixel_seconds + _median([first.wall + rest.wall for first, rest in pages]), 1),
        "first_token_seconds": round(_median([first.wall for first, _ in pages]), 2),
        "first_token_core_seconds": round(_median([first.cpu for first, _ in pages]), 2),
        "token_milliseconds": round(_median([rest.wall for _, rest in pages]) / (tokens - 1) * 1000, 1),
        "token_core_milliseconds": round(_median([rest.cpu for _, rest in pages]) / (tokens - 1) * 1000, 1),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def main() -> None:
    """Measure each model in each number format, in a process of its own; print the rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500, help="of the answer, at least 2")
    parser.add_argument("--rounds", type=int, default=2, help="pages of each model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--out", type=Path, help="the file of results, JSON")
    arguments = parser.parse_args()
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for name, number_format in itertools.product(arguments.models, FORMATS):
            row = processes.submit(measure, name, number_format, arguments.tokens, arguments.rounds).result()
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.out is not None:
        write(arguments.out, "benchmarks.document_page", rows)


if __name__ == "__main__":
    main()
