"""The longest gap between two tokens of an answer while other clients' images are encoded and prompts computed.

    python -m benchmarks.engine.token_gap DIR [--size 1280 960] [--images 1] [--bounds 0.5]

DIR holds a Qwen3-VL (`python -m benchmarks.engine.shape_2b DIR`, or the bundled model's folder). One engine in this
process, without gateway and wire. An answer is written alone for some tokens; then requests come, each with an image
of its own. Rounds in turn: images and prompts in whole steps, and with each bound (`--max-inter-token-latency`). Prints
the median gap without images, the longest with them, and the seconds until the last of the images has its first token.
"""

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

ROUNDS = 2
WHOLE: dict[str, float] = {"encode_budget_patches": 1 << 20, "max_inter_token_latency": 0.0}
"""The quarter of this budget that a step with decodes has holds the image."""
PATCH, PIXEL_VALUES = 16, 768
LEAST_ALONE = 12
MOST_TOKENS = 4000


def image_request(engine: Engine, number: int, size: tuple[int, int]) -> EngineRequest:
    """Return a request for one token after an image of *size*, (width, height), that no other *number* shares."""
    rows, columns = size[1] // PATCH, size[0] // PATCH
    num_patches = rows * columns
    pixels = np.random.default_rng(number).integers(0, 256, num_patches * PIXEL_VALUES, dtype=np.uint8).tobytes()
    item = MediaItem(
        modality="image",
        content_hash=number.to_bytes(32, "little"),
        grid=(1, rows, columns),
        spans=(Span(1, num_patches // 4),),
        pixel_shape=(num_patches, PIXEL_VALUES),
        inline=pixels,
    )
    placeholder = engine.validator.spec.placeholder_of["image"]
    token_ids = [1, *[placeholder] * (num_patches // 4), 2]
    return EngineRequest(
        request_id=f"image {number}",
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1, temperature=0),
        media=(item,),
    )


def measure(engine: Engine, images: list[EngineRequest]) -> tuple[float, float, float]:
    """Return the seconds of a round: the answer's median gap alone, its longest with *images*, and their wait."""
    sampling = SamplingParams(max_tokens=MOST_TOKENS, min_tokens=MOST_TOKENS, temperature=0)
    engine.requests.submit(0, EngineRequest(request_id="answer", token_ids=[3, 4, 5], sampling=sampling))
    alone = [gap for gap, _ in itertools.islice(gaps(engine), LEAST_ALONE)]
    for image in images:
        engine.requests.submit(0, image)
    began, longest, left = time.perf_counter(), 0.0, len(images)
    for gap, num_ended in gaps(engine):
        longest, left = max(longest, gap), left - num_ended
        if not left:
            break
    waited = time.perf_counter() - began
    engine.requests.abort(0, "answer")
    while engine.has_work:
        engine.step()
    return statistics.median(alone[1:]), longest, waited


def gaps(engine: Engine) -> Iterator[tuple[float, int]]:
    """Run steps. Yield the time between each two tokens of the answer, and how many images had a token meanwhile."""
    before, num_ended = time.perf_counter(), 0
    while True:
        names = [delta.request_id for frame in engine.step().values() for delta in frame.deltas]
        num_ended += sum(name != "answer" for name in names)
        if "answer" in names:
            now = time.perf_counter()
            yield now - before, num_ended
            before, num_ended = now, 0


def main() -> None:
    """Measure the model that the first argument names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 960))
    parser.add_argument("--images", type=int, nargs="+", default=(1,))
    parser.add_argument("--bounds", type=float, nargs="+", default=(EngineConfig.max_inter_token_latency,))
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    common = {
        "device": "cpu", "max_num_seqs": 16, "threads": arguments.threads, "enable_prefix_caching": False,
        "quantization": arguments.quantization,
    }  # fmt: skip
    settings = {"whole": WHOLE, **{f"{bound:g} s": {"max_inter_token_latency": bound} for bound in arguments.bounds}}
    engines = {
        name: startup.start(EngineConfig(arguments.model, "m", **common, **one), lambda *_: None)  # type: ignore[arg-type]
        for name, one in settings.items()
    }
    numbers = itertools.count()
    for num_images in arguments.images:
        found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for turn in range(arguments.rounds):
            for name in engines if turn % 2 else reversed(engines):
                images = [image_request(engines[name], next(numbers), arguments.size) for _ in range(num_images)]
                found[name].append(measure(engines[name], images))
        whole = statistics.median(waited for _, _, waited in found["whole"])
        for name in engines:
            alone, longest, waited = (statistics.median(column) for column in zip(*found[name], strict=True))
            print(
                f"{num_images} images, {name}: gap alone {alone:.3f} s, longest with images {longest:.3f} s, "
                f"last first token after {waited:.2f} s, {waited / whole:.2f} of whole",
                flush=True,
            )


if __name__ == "__main__":
    main()
