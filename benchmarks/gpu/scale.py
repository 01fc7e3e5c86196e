"""How large the parts of the benchmark are: as on a GPU, or small enough to rehearse them on a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import shapes
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.subject import again
from saccade.engine.config import EngineConfig
from saccade.engine.executor.graphs import Capture
from saccade.nn.backends import BACKENDS, VISION_BACKENDS


@dataclass(frozen=True)
class Scale:
    """Device, number format, models by size, and the lengths that are measured.

    *decoders* and *towers* are the attention backends. *rows* decode after *context* tokens, *most_rows* after *deep*
    ones, one row after *long* ones; *prompt* has the tokens of an image of *photo_size* pixels and a question.
    *patches* are those of the images of a check, *photo* of the image that is timed.
    *prompts* are the lengths of the prompts in a row, *seen* the numbers of token ids with penalties. A call is
    timed *repeats* times; answers have *answer* tokens. *capture* is
    CUDA's, or a stand-in.
    """

    device: str
    dtype: str
    shapes: Mapping[str, Shape]
    decoders: tuple[str, ...]
    towers: tuple[str, ...]
    rows: tuple[int, ...]
    context: int
    most_rows: int
    deep: int
    long: int
    prompt: int
    photo_size: tuple[int, int]
    patches: tuple[int, ...]
    photo: int
    prompts: tuple[int, ...]
    seen: tuple[int, ...]
    repeats: int
    answer: int
    capture: Capture | None = None

    def config(self, size: str, folder: Path, model: str | None) -> EngineConfig:
        """Return the configuration of the model *size*, in a folder below *folder*; *model* is one to take instead."""
        path = model or str(shapes.write(folder / size, self.shapes[size]))
        return EngineConfig(
            path,
            "benchmark",
            device=self.device,
            dtype=self.dtype,
            load_format="auto" if model else "dummy",  # type: ignore[arg-type]
        )


FULL = Scale(
    device="cuda",
    dtype="bfloat16",
    shapes={"2b": shapes.SHAPE_2B, "8b": shapes.SHAPE_8B},
    decoders=tuple(name for name, entry in BACKENDS.items() if entry.device_type in (None, "cuda")),
    towers=tuple(name for name, entry in VISION_BACKENDS.items() if entry.device_type in (None, "cuda")),
    rows=(1, 8, 64),
    context=512,
    most_rows=64,
    deep=4096,
    long=32768,
    prompt=1220,
    photo_size=(1280, 960),
    patches=(256, 1024, 4096, 64, 576),
    photo=4800,
    prompts=tuple(range(40, 2040, 20)),
    seen=(0, 300, 2000, 8000),
    repeats=20,
    answer=24,
)
REHEARSAL = Scale(
    device="cpu",
    dtype="float32",
    shapes={"2b": shapes.SHAPE_TINY, "8b": shapes.SHAPE_TINY},
    decoders=("torch_sdpa", "triton"),
    towers=("torch_sdpa", "triton"),
    rows=(1,),
    context=20,
    most_rows=2,
    deep=30,
    long=40,
    prompt=20,
    photo_size=(64, 64),
    patches=(8, 4),
    photo=16,
    prompts=(3, 5),
    seen=(0, 4),
    repeats=1,
    answer=3,
    capture=again,
)
