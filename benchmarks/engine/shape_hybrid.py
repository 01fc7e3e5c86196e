"""A Qwen3.5 of about the smallest release's shape with random weights: memory to load it, and time beside transformers.

    OMP_NUM_THREADS=1 python -m benchmarks.engine.shape_hybrid DIR [--dtype float32]

fills DIR (1.7 GB in bfloat16) where it is empty, loads it into the engine and then into transformers, and has both
answer the same token ids in turn. The tokenizer is the bundled model's, so answers are not text.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engine.shape_2b import BUNDLED, NUM_DRAWN, drawn_tensor
from benchmarks.engine.shape_3b import AnonymousMemory
from benchmarks.measured import ROOT, commit, machine
from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest, SamplingParams

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

from torchvision_schemas import import_torchvision

TEXT = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "attn_output_gate": True, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
VISION = {
    "model_type": "qwen3_5", "depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072,
    "out_hidden_size": 1024, "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
}  # fmt: skip
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "torch_dtype": "bfloat16",
    "image_token_id": 413, "video_token_id": 414, "vision_start_token_id": 411, "vision_end_token_id": 412,
    "tie_word_embeddings": True, "text_config": TEXT, "vision_config": VISION,
}  # fmt: skip
PROMPT_TOKENS, ANSWER_TOKENS, NUM_ROUNDS = 256, 32, 3
PROMPT = [1 + (7 * index) % 300 for index in range(PROMPT_TOKENS)]


def empty_network() -> Any:
    """Return transformers' network without storage, for the names and shapes of its tensors."""
    import_torchvision()
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    with torch.device("meta"):
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(**CONFIG))


def write(folder: Path) -> Path:
    """Fill *folder* where it is not complete, and return it."""
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.iterdir():
        if path.name not in (weights.name, "config.json", "README.md"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    drawn = torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    shapes = {name: tensor.shape for name, tensor in empty_network().state_dict().items() if name != "lm_head.weight"}
    tensors = {name: _tensor(name, tuple(shape), drawn) for name, shape in shapes.items()}
    save_file(tensors, weights.with_suffix(".part"), metadata={"format": "pt"})
    weights.with_suffix(".part").rename(weights)
    return folder


def _tensor(name: str, shape: tuple[int, ...], drawn: torch.Tensor) -> torch.Tensor:
    tensor = drawn_tensor(name, shape, drawn)
    # Most norms multiply by 1 + weight.
    is_offset = name.endswith("norm.weight") and "linear_attn" not in name and "visual" not in name
    return tensor - 1 if is_offset else tensor


def ours(engine: Engine, number: int) -> tuple[float, float, list[int]]:
    """Answer the prompt; return seconds to the first token, seconds between tokens, and the ids."""
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    engine.requests.submit(0, EngineRequest(request_id=str(number), token_ids=PROMPT, sampling=sampling))
    began, times, ids = time.perf_counter(), list[float](), list[int]()
    while engine.has_work:
        for frame in engine.step().values():
            for delta in frame.deltas:
                ids += delta.token_ids
                times += [time.perf_counter()] * len(delta.token_ids)
    return times[0] - began, (times[-1] - times[0]) / (len(times) - 1), ids


class Clock:
    """A streamer in generate's sense: notes when each token came. The prompt comes first, at once."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take one token of every sequence."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


@torch.inference_mode()
def theirs(model: Any) -> tuple[float, float, list[int]]:
    """Do the same by transformers' generate."""
    clock, ids = Clock(), torch.tensor([PROMPT])
    began = time.perf_counter()
    output = model.generate(
        input_ids=ids, do_sample=False, max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, streamer=clock
    )
    _, first, *_, last = clock.times
    return first - began, (last - first) / (ANSWER_TOKENS - 1), output[0, PROMPT_TOKENS:].tolist()


def main() -> None:
    """Write the checkpoint, load it twice, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    folder = write(options.folder)
    memory, began = AnonymousMemory(), time.perf_counter()
    settings: dict[str, Any] = {"device": "cpu", "dtype": options.dtype, "threads": torch.get_num_threads()}
    config = EngineConfig(
        str(folder), "hybrid", kv_cache_bytes=1 << 28, max_num_seqs=4, enable_prefix_caching=False, **settings
    )
    engine = startup.start(config, lambda *_: None)
    print(f"{machine()}; {torch.get_num_threads()} threads; {options.dtype}; commit {commit()}\n", flush=True)
    print(f"start {time.perf_counter() - began:.1f} s, peak of anonymous memory {memory.peak_mib} MiB\n", flush=True)
    import_torchvision()
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    rounds = [(ours(engine, number), theirs(model)) for number in range(NUM_ROUNDS)]
    print("| | first token, s | between tokens, ms |\n|---|---|---|")
    for side, name in enumerate(("saccade", "transformers")):
        first, between = (statistics.median(pair[side][index] for pair in rounds) for index in (0, 1))
        print(f"| {name} | {first:.2f} | {1000 * between:.1f} |")
    same = sum(one == other for one, other in zip(rounds[0][0][2], rounds[0][1][2], strict=True))
    print(f"\nequal ids: {same} of {ANSWER_TOKENS}")


if __name__ == "__main__":
    main()
