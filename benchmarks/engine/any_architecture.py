"""What the classes of transformers cost against a family's own network: one InternVL, computed both ways, in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.engine.any_architecture FOLDER [--tiny] [--dtype float32]

FOLDER gets an InternVL with random weights, whose text network has the shape of the 2B release of Qwen3-VL: 3.6 GB.
Both engines are in this process, and every figure is processor time of its only thread: other work on the machine
counts little. Prints medians of five: a prompt of 1,000 tokens, and a decode step at 1 row and at 8.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.engine.shape_2b import BUNDLED, NUM_DRAWN
from benchmarks.measured import commit, machine
from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.protocol.request import EngineRequest, SamplingParams

IMPLEMENTATIONS = ("saccade", "transformers")
PROMPT, NUM_DECODES, REPEATS = 1000, 16, 5
TEXT = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    **TEXT, "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
VISION = {
    "model_type": "internvl_vision", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": [56, 56], "patch_size": [14, 14],
}  # fmt: skip
IMAGE_TOKENS = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")


def write(folder: Path, text: dict[str, object]) -> Path:
    """Fill *folder* where it is empty, and return it."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, folder)
    settings = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    first = json.loads((BUNDLED / "config.json").read_text())["text_config"]["vocab_size"]
    ids = {token: first + number for number, token in enumerate(IMAGE_TOKENS)}
    settings["added_tokens_decoder"] |= {
        str(number): {"content": token, "special": True} for token, number in ids.items()
    }
    settings["extra_special_tokens"] = {
        "context_image_token": IMAGE_TOKENS[0], "start_image_token": IMAGE_TOKENS[1],
        "end_image_token": IMAGE_TOKENS[2], "video_token": IMAGE_TOKENS[3],
    }  # fmt: skip
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    pixels = {
        "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}, "crop_to_patches": True,
        "min_patches": 1, "max_patches": 4, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    for name, values in (
        ("tokenizer_config.json", settings), ("processor_config.json", processor), ("preprocessor_config.json", pixels),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(values))
    config = InternVLConfig.from_dict(
        {"text_config": text, "vision_config": VISION, "image_token_id": ids[IMAGE_TOKENS[0]], "image_seq_length": 4,
         "tie_word_embeddings": True, "dtype": "bfloat16"}
    )  # fmt: skip
    with torch.device("meta"):
        model = InternVLForConditionalGeneration(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    drawn = torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for parameter in model.parameters():
        values = drawn.repeat(-(-parameter.numel() // len(drawn)))[: parameter.numel()].view(parameter.shape)
        parameter.data = values * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else torch.ones_like(values)
    model.save_pretrained(folder)
    return folder


def engine(folder: Path, implementation: str, dtype: str) -> Engine:
    """Return an engine with one thread, whose network is computed by *implementation*."""
    config = EngineConfig(
        str(folder), "benchmark", device="cpu", dtype=dtype, threads=1, max_num_seqs=8, kv_cache_bytes=1 << 29,
        enable_prefix_caching=False, max_inter_token_latency=0, model_impl=implementation,
    )  # fmt: skip
    return start(config, lambda *_: None)


def measure(subject: Engine, num_rows: int, num_tokens: int) -> tuple[float, float]:
    """Answer *num_rows* prompts of *num_tokens*; return the seconds of all prompts, and of the median decode step."""
    sampling = SamplingParams(max_tokens=NUM_DECODES + 1, temperature=0)
    for row in range(num_rows):
        token_ids = [(row + place) % 100 for place in range(num_tokens)]
        subject.requests.submit(0, EngineRequest(request_id=str(row), token_ids=token_ids, sampling=sampling))
    began = time.thread_time()
    while subject.scheduler.waiting or any(one.num_pending_tokens > 1 for one in subject.scheduler.running):
        subject.step()
    prompt_seconds, steps = time.thread_time() - began, []
    while subject.has_work:
        began = time.thread_time()
        subject.step()
        steps.append(time.thread_time() - began)
    return prompt_seconds, statistics.median(steps[:NUM_DECODES])


def main() -> None:
    """Print a table with a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the program")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    # The library imports it if it is installed, and it may be for another build of torch.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    folder = write(arguments.folder, TINY if arguments.tiny else TEXT)
    engines = {name: engine(folder, name, arguments.dtype) for name in IMPLEMENTATIONS}
    times: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(REPEATS):
        for name, subject in engines.items():
            prompt, step = measure(subject, 1, PROMPT)
            times[f"prompt of {PROMPT} tokens"][name].append(prompt)
            times["decode step, 1 row"][name].append(step)
            times["decode step, 8 rows"][name].append(measure(subject, 8, PROMPT // 8)[1])
    print(f"{machine()}; {arguments.dtype}, 1 thread, medians of {REPEATS}; commit {commit()}\n")
    print("| case | Saccade's network, ms | transformers' classes, ms | ratio |\n|---|---|---|---|")
    for case, measured in times.items():
        own, other = (1000 * statistics.median(measured[name]) for name in IMPLEMENTATIONS)
        print(f"| {case} | {own:.1f} | {other:.1f} | {other / own:.2f} |")


if __name__ == "__main__":
    main()
