"""A Qwen2.5-VL of the 3B release's shape with random weights: does it load and answer within this machine's memory?

    python -m benchmarks.engine.shape_3b DIR [--answer saccade | transformers] [--grids 0 32x32 68x92]

fills DIR (7.5 GB in bfloat16) and, with --answer, loads it in this process and answers one prompt after the other: for
each grid of patches an image (0: none), 8 tokens. Prints seconds and the process's peak of anonymous memory. The
tokenizer is the bundled model's, so answers are not text.
"""

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from benchmarks.engine.shape_2b import BUNDLED, NUM_DRAWN, VOCABULARY, biased, drawn_tensor
from benchmarks.measured import ROOT
from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True, "use_sliding_window": False, "bos_token_id": 401, "eos_token_id": 403,
}  # fmt: skip
VISION = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
IMAGE_TOKEN, VIDEO_TOKEN = 413, 414
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
    "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "vision_config": VISION, **TEXT,
}  # fmt: skip
PROCESSOR = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
SHARD_BYTES = 1 << 30


def write(folder: Path) -> Path:
    """Fill *folder* where it is not complete, and return it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.iterdir():
        if path.name not in ("model.safetensors", "config.json", "preprocessor_config.json", "README.md"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    drawn = torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    places: dict[str, str] = {}
    num_bytes = 0
    for number, shapes in enumerate(_shards(), start=1):
        file = f"model-{number:05}.safetensors"
        tensors = {name: drawn_tensor(name, shape, drawn) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": places}))
    return folder


def _shards() -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in _shapes():
        shard[name] = shape
        if 2 * sum(int(np.prod(one)) for one in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the checkpoint's tensors, named as the release names them."""
    hidden, mlp, kv_width = 2048, 11008, 256
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(36):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (hidden,)
        for name, width in (("q", hidden), ("k", kv_width), ("v", kv_width)):
            yield from biased(f"{prefix}.self_attn.{name}_proj", width, (hidden,))
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (mlp, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (mlp, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, mlp)
    yield from _tower(width=1280, mlp=3420, hidden=hidden)


def _tower(width: int, mlp: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "visual.patch_embed.proj.weight", (width, 3, 2, 14, 14)
    for block in range(32):
        prefix = f"visual.blocks.{block}"
        yield f"{prefix}.norm1.weight", (width,)
        yield f"{prefix}.norm2.weight", (width,)
        yield from biased(f"{prefix}.attn.qkv", 3 * width, (width,))
        yield from biased(f"{prefix}.attn.proj", width, (width,))
        yield from biased(f"{prefix}.mlp.gate_proj", mlp, (width,))
        yield from biased(f"{prefix}.mlp.up_proj", mlp, (width,))
        yield from biased(f"{prefix}.mlp.down_proj", width, (mlp,))
    yield "visual.merger.ln_q.weight", (width,)
    yield from biased("visual.merger.mlp.0", 4 * width, (4 * width,))
    yield from biased("visual.merger.mlp.2", hidden, (4 * width,))


class AnonymousMemory:
    """The peak of this process's anonymous memory, sampled by a thread until the program ends."""

    def __init__(self) -> None:
        self.peak_mib = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            kib = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
            self.peak_mib = max(self.peak_mib, int(kib) // 1024)
            time.sleep(0.05)


Grid = tuple[int, int, int]
NUM_TOKENS = 8


class Prompt(NamedTuple):
    """Token ids, and the patches [P, 588] of the image, if there is one."""

    token_ids: list[int]
    pixels: npt.NDArray[np.uint8]
    grid: Grid


def prompt(grid: Grid) -> Prompt:
    """Return a prompt with an image of *grid*; without one if the grid is empty."""
    num_patches = grid[1] * grid[2]
    pixels = np.random.default_rng(num_patches).integers(0, 256, (num_patches, 588), dtype=np.uint8)
    return Prompt([1, 2, 3, *[IMAGE_TOKEN] * (num_patches // 4), 7, 8], pixels, grid)


def answer_by_saccade(folder: Path, threads: int) -> Callable[[Prompt], int]:
    """Load the model, and return what answers a prompt with a number of tokens."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "threads": threads, "max_num_seqs": 4}
    engine = startup.start(EngineConfig(str(folder), "3b", kv_cache_bytes=1 << 28, **settings), lambda *_: None)

    def answer(question: Prompt) -> int:
        num_patches = len(question.pixels)
        item = MediaItem(
            modality="image",
            content_hash=num_patches.to_bytes(32, "little"),
            grid=question.grid,
            spans=(Span(3, num_patches // 4),),
            pixel_shape=question.pixels.shape,
            inline=question.pixels.tobytes(),
        )
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        media = (item,) if num_patches else ()
        engine.requests.submit(
            0, EngineRequest(request_id="3b", token_ids=question.token_ids, sampling=sampling, media=media)
        )
        num_tokens = 0
        while engine.has_work:
            for frame in engine.step().values():
                num_tokens += sum(len(delta.token_ids) for delta in frame.deltas)
        return num_tokens

    return answer


def answer_by_transformers(folder: Path, threads: int) -> Callable[[Prompt], int]:
    """Load the model, and return what answers a prompt with a number of tokens."""
    # Transformers cannot be imported beside a torchvision for another torch, which the tests mend.
    sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]
    from torchvision_schemas import import_torchvision

    import_torchvision()
    from transformers import Qwen2_5_VLForConditionalGeneration

    torch.set_num_threads(threads)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).eval()
    mean, std = (255 * torch.tensor(PROCESSOR[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))

    @torch.inference_mode()
    def answer(question: Prompt) -> int:
        ids = torch.tensor([question.token_ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        if len(question.pixels):
            values = (torch.from_numpy(question.pixels).view(-1, 3, 1, 196) - mean) / std
            inputs["pixel_values"] = values.expand(-1, -1, 2, -1).flatten(1).to(torch.bfloat16)
            inputs["image_grid_thw"] = torch.tensor([question.grid])
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
        return int(output.shape[1]) - len(question.token_ids)

    return answer


SYSTEMS = {"saccade": answer_by_saccade, "transformers": answer_by_transformers}


def measure(folder: Path, system: str, grids: Sequence[Grid], threads: int) -> None:
    """Load the model by *system*, answer, and print what that took."""
    memory, began = AnonymousMemory(), time.perf_counter()
    answer = SYSTEMS[system](folder, threads)
    print(f"{system}: start {time.perf_counter() - began:.1f} s, peak {memory.peak_mib} MiB", flush=True)
    for grid in grids:
        question, began, used = prompt(grid), time.perf_counter(), time.process_time()
        num_tokens = answer(question)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
        patches, times = len(question.pixels), f"{seconds:.1f} s, {cpu_seconds:.1f} s of processors"
        print(f"{patches} patches: {num_tokens} tokens, {times}, peak {memory.peak_mib} MiB", flush=True)


def _grid(text: str) -> Grid:
    rows, _, columns = text.partition("x")
    return 1, int(rows), int(columns or 0)


def main() -> None:
    """Write the checkpoint, and answer if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answer", choices=SYSTEMS)
    parser.add_argument("--grids", nargs="+", type=_grid, default=[(1, 0, 0), (1, 32, 32), (1, 68, 92)])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    folder = write(options.folder)
    if options.answer:
        measure(folder, options.answer, options.grids, options.threads)


if __name__ == "__main__":
    main()
