"""The longest gap between two tokens of an answer while another client's image is encoded and its prompt computed.

    python -m benchmarks.engine.token_gap DIR [SIDE]

DIR holds a Qwen3-VL (`python -m benchmarks.engine.shape_2b DIR`, or the bundled model's folder). One engine in this
process, without gateway and wire. An answer is written alone for some tokens; then a request with an image of SIDE
patches a side comes (default 60). Rounds in turn: the image and its prompt in one step each, and with the bound
(`--max-inter-token-latency`). Prints the median gap without the image, the longest with it, and the image's wait.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

ROUNDS = 2
WHOLE = {"encode_budget_patches": 1 << 20, "max_inter_token_latency": 0.0}
"""The quarter of this budget that a step with decodes has holds the image."""
BOUNDED: dict[str, float] = {}
PIXEL_VALUES = 768


def image_request(engine: Engine, number: int, side: int) -> EngineRequest:
    """Return a request for one token after an image of *side* x *side* patches that no other *number* shares."""
    num_patches = side * side
    pixels = np.random.default_rng(number).integers(0, 256, num_patches * PIXEL_VALUES, dtype=np.uint8).tobytes()
    item = MediaItem(
        modality="image",
        content_hash=number.to_bytes(32, "little"),
        grid=(1, side, side),
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


def measure(engine: Engine, number: int, side: int) -> tuple[float, float, float]:
    """Return the seconds of a round: the answer's median gap alone, its longest with the image, the image's wait."""
    sampling = SamplingParams(max_tokens=400, min_tokens=400, temperature=0)
    request = EngineRequest(request_id=f"answer {number}", token_ids=[3, 4, 5 + number % 100], sampling=sampling)
    engine.requests.submit(0, request)
    times: list[float] = []
    alone: list[float] = []
    began = 0.0
    while True:
        frames = engine.step()
        now = time.perf_counter()
        for delta in (delta for frame in frames.values() for delta in frame.deltas):
            if delta.request_id.startswith("answer"):
                times.append(now)
            else:
                gaps = [after - before for before, after in itertools.pairwise(times)]
                engine.requests.abort(0, f"answer {number}")
                engine.step()
                return statistics.median(alone), max(gaps), now - began
        if not alone and len(times) == 12:
            alone = [after - before for before, after in itertools.pairwise(times)]
            times, began = times[-1:], now
            engine.requests.submit(0, image_request(engine, number, side))


def main() -> None:
    """Measure the model that the first argument names."""
    folder, side = str(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    common = {"device": "cpu", "max_num_seqs": 8, "threads": 2, "enable_prefix_caching": False}
    engines = {
        name: startup.start(EngineConfig(model_dir=folder, model="m", **common, **settings), lambda *_: None)  # type: ignore[arg-type]
        for name, settings in (("whole", WHOLE), ("bounded", BOUNDED))
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for turn in range(ROUNDS + 1):
        for place, name in enumerate(engines if turn % 2 else reversed(engines)):
            figures = measure(engines[name], 2 * turn + place, side)
            if turn:
                found[name].append(figures)
    for name, rounds in found.items():
        alone, longest, first = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name}: gap alone {alone:.3f} s, longest with the image {longest:.3f} s, its first token {first:.2f} s")
    ratio = [statistics.median(one[2] for one in found[name]) for name in ("bounded", "whole")]
    print(f"first token of the image, bounded / whole: {ratio[0] / ratio[1]:.2f}")


if __name__ == "__main__":
    main()
