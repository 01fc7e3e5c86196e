"""PNG to RGB by saccade.media.decode and by Pillow alone, in turn: `OMP_NUM_THREADS=1 python -m benchmarks.png`."""

import io
import statistics
import time

from PIL import Image

from benchmarks.engine.load import random_png
from benchmarks.measured import commit, machine
from saccade.media.decode import decode
from saccade.media.header import ImageLimits

SIZES = ((448, 448), (1280, 960))
NUM_ROUNDS = 40


def encoded(width: int, height: int, mode: str) -> bytes:
    """Return a PNG of smooth noise; "opaque" has transparency everywhere at its end, "RGBA" every degree of it."""
    noise = random_png(1, width, height)
    if mode == "RGB":
        return noise
    with Image.open(io.BytesIO(noise)) as image:
        alpha = image.getchannel("R") if mode == "RGBA" else 255
        image.putalpha(alpha)
        file = io.BytesIO()
        image.save(file, "PNG")
    return file.getvalue()


def by_pillow(data: bytes) -> Image.Image:
    """Decode as the reference processors do: on white where there is transparency."""
    with Image.open(io.BytesIO(data)) as image:
        if image.mode == "RGB":
            image.load()
            return image
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def main() -> None:
    """Print a table: medians in ms, and ours over Pillow's."""
    print(f"{machine()}; commit {commit()}\n\n| image | ours, ms | Pillow, ms | ratio |\n|---|---|---|---|")
    limits = ImageLimits()
    for width, height in SIZES:
        for mode in ("RGB", "opaque", "RGBA"):
            data = encoded(width, height, mode)
            ours, pillows = list[float](), list[float]()
            for _ in range(NUM_ROUNDS):
                began = time.perf_counter()
                decode(data, limits)
                middle = time.perf_counter()
                by_pillow(data)
                ours.append(1000 * (middle - began))
                pillows.append(1000 * (time.perf_counter() - middle))
            one, other = statistics.median(ours), statistics.median(pillows)
            print(f"| {width}x{height}, {mode} | {one:.1f} | {other:.1f} | {one / other:.2f}x |")


if __name__ == "__main__":
    main()
