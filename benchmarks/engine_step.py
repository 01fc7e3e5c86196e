"""What one decode step costs, and how much of it is not the network.

    OMP_NUM_THREADS=1 python benchmarks/engine_step.py MODEL_DIR [--batch 1 8 64] [--prompt 92] [--tokens 200]

Prints, for each batch size, the median step in milliseconds, its parts (means), and output tokens per second. The
engine runs in this process: no gateway, no wire.
"""

import argparse
import statistics
import time

from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.protocol.request import EngineRequest, SamplingParams

PARTS = ("schedule", "batch", "network", "postprocess")


def measure(engine: Engine, batch: int, prompt: int, tokens: int) -> None:
    """Decode *batch* prompts of *prompt* tokens side by side and print one line."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0)
    for number in range(batch):
        token_ids = [(number + index) % 100 for index in range(prompt)]
        engine.requests.submit(0, EngineRequest(request_id=f"{batch}-{number}", token_ids=token_ids, sampling=sampling))
    while engine.scheduler.waiting or any(sequence.num_pending_tokens > 1 for sequence in engine.scheduler.running):
        engine.step()
    before, steps, count = engine.load(), [], 0
    while engine.has_work:
        began = time.perf_counter()
        frames = engine.step()
        steps.append(time.perf_counter() - began)
        count += sum(len(delta.token_ids) for frame in frames.values() for delta in frame.deltas)
    after = engine.load()
    parts = "  ".join(
        f"{part} {1000 * (getattr(after, name) - getattr(before, name)) / len(steps):.3f}"
        for part in PARTS
        for name in [f"{part}_seconds_total"]
    )
    median, rate = 1000 * statistics.median(steps), count / sum(steps)
    print(f"batch {batch:3d}  step {median:7.3f} ms  ({parts})  {rate:8.0f} tokens/s")


def main() -> None:
    """Measure the model that the first argument names, on the CPU unless told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=92)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    config = EngineConfig(arguments.model, "benchmark", device=arguments.device, max_num_seqs=max(arguments.batch))
    engine = start(config, lambda *_: None)
    for batch in arguments.batch:
        measure(engine, batch, arguments.prompt, arguments.tokens)


if __name__ == "__main__":
    main()
