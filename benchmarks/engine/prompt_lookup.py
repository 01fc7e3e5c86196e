"""What prompt lookup gains and costs with a trained text model: `python -m benchmarks.engine.prompt_lookup DIR`.

DIR holds a text model, such as SmolLM2 (tests/real/smollm2.py writes it). The texts are the licence that the model
copies, a list that it continues, and a story that it invents, sampled. Each run is next to one without proposals, in
this process. Prints tokens a step and client, and the ratio of CPU time of all decodes.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.measured import ROOT
from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.core.speculation import Speculation
from saccade.engine.loop import Engine
from saccade.protocol.request import EngineRequest, SamplingParams


@dataclass(frozen=True)
class Task:
    """What the model goes on with: *prompt*, sampled at *temperature*."""

    prompt: str
    temperature: float = 0.0


def tasks() -> dict[str, Task]:
    """Return the tasks by name."""
    licence = " ".join((ROOT / "LICENSE").read_text().split())[2000:3200]
    rows = "\n".join(f'{{"id": {number}, "name": "item {number}", "price": {number * 3}.50}}' for number in range(1, 9))
    return {
        "copies": Task(f"The text:\n{licence}\n\nThe same text again:\n{licence[:120]}"),
        "continues a list": Task(f"{rows}\n"),
        "invents": Task("Once upon a time, in a village by the sea, there lived", 0.8),
    }


def run(engine: Engine, token_ids: list[int], task: Task, num_clients: int, num_tokens: int) -> tuple[float, float]:
    """Return the CPU seconds of all decodes, and tokens a step and client."""
    for number in range(num_clients):
        sampling = SamplingParams(
            max_tokens=num_tokens, min_tokens=num_tokens, temperature=task.temperature, seed=number
        )
        engine.requests.submit(0, EngineRequest(request_id=str(number), token_ids=token_ids, sampling=sampling))
    engine.step()
    began, num_steps = time.process_time(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return time.process_time() - began, (num_tokens - 1) / num_steps


def main() -> None:
    """Measure the model that the first argument names, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--proposals", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    options = parser.parse_args()
    config = EngineConfig(
        str(options.model), "benchmark", device="cpu", dtype=options.dtype, threads=options.threads,
        quantization=options.quantization, enable_prefix_caching=False, kv_cache_bytes=1 << 28,
        speculative_config=json.dumps({"num_speculative_tokens": options.proposals}),
    )  # fmt: skip
    engine = startup.start(config, lambda *_: None)
    speculation: Speculation | None = engine.scheduler.speculation
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    print("| clients | the model | tokens a step and client | CPU, ratio |\n|---|---|---|---|")
    for num_clients in options.clients:
        for name, task in tasks().items():
            found = []
            for _ in range(options.repeats):
                seconds = []
                for proposing in (None, speculation):
                    engine.scheduler.speculation = proposing
                    token_ids = tokenizer.encode(task.prompt).ids
                    cpu, per_step = run(engine, token_ids, task, num_clients, options.tokens)
                    seconds.append(cpu)
                found.append((per_step, seconds[1] / seconds[0]))
            per_step, ratio = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"| {num_clients} | {name} | {per_step:.2f} | {ratio:.3f} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
