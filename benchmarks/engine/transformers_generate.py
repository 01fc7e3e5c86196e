"""transformers' own generate on one case, in this process: `python -m benchmarks.engine.transformers_generate '{...}'`.

What a server does is done here too: the image comes as PNG, is decoded and prepared by the release's own processor,
and the answer is turned into text as it comes. One request at a time. One JSON object on standard output.
"""

import io
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

from torchvision_schemas import import_torchvision  # noqa: E402

from benchmarks.engine.load import WARM_UP_NUMBER, image_number, latencies, question, random_png  # noqa: E402

NUM_WARMUP = 2


class Clock:
    """A streamer in generate's sense: notes when the first and the last token came, and turns each into text."""

    def __init__(self, tokenizer: Any) -> None:
        self.times: list[float] = []
        self._tokenizer = tokenizer

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        if value.ndim == 1:
            self._tokenizer.decode(value)
            self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


@dataclass(frozen=True)
class Subject:
    """The release's processor and model."""

    processor: Any
    model: Any
    output_tokens: int

    def ask(self, png: bytes | None, text: str) -> tuple[float, float, int]:
        """Answer one request; return seconds to the first token, between tokens, and the prompt's length."""
        begun = time.perf_counter()
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if png is not None:
            content.insert(0, {"type": "image", "image": Image.open(io.BytesIO(png)).convert("RGB")})
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        ).to(self.model.dtype)
        clock, count = Clock(self.processor.tokenizer), self.output_tokens
        self.model.generate(
            **inputs, streamer=clock, do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None
        )
        gap = (clock.times[-1] - clock.times[0]) / (count - 1)
        return clock.times[0] - begun, gap, inputs["input_ids"].shape[1]


def load_subject(folder: str, output_tokens: int) -> Subject:
    """Load processor and model from *folder*, in bfloat16."""
    import_torchvision()
    import transformers

    transformers.logging.set_verbosity_error()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    return Subject(processor, model.eval(), output_tokens)


def main() -> None:
    """Warm up, measure, print."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    subject = load_subject(settings["model"], settings["output_tokens"])

    def ask(number: int) -> tuple[float, float, int]:
        drawn = image_number(number, settings["first_number"], same=settings["same"])
        png = None if settings["size"] is None else random_png(drawn, *settings["size"])
        return subject.ask(png, question(number))

    for number in range(NUM_WARMUP):
        ask(WARM_UP_NUMBER + settings["first_number"] + number)
    answers, wall_seconds, cpu_seconds = [], 0.0, 0.0
    for number in range(settings["first_number"], settings["first_number"] + settings["num_requests"]):
        before = _cpu_seconds()
        answers.append(ask(number))
        cpu_seconds += _cpu_seconds() - before
        wall_seconds += answers[-1][0] + answers[-1][1] * (settings["output_tokens"] - 1)
    to_first, gaps, prompt_tokens = zip(*answers, strict=True)
    figures = {
        "requests": len(answers),
        **latencies(to_first, gaps),
        "requests_per_second": round(len(answers) / wall_seconds, 2),
        "output_tokens_per_second": round(settings["output_tokens"] * len(answers) / wall_seconds, 1),
        "server_cpu_ms": round(1000 * cpu_seconds / len(answers), 1),
        "prompt_tokens": statistics.median(prompt_tokens),
        "load_average": round(os.getloadavg()[0], 2),
        "peak_pss_mib": round(psutil.Process().memory_full_info().pss / (1 << 20), 1),
    }
    print(json.dumps(figures))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
