"""What planning a step costs: the scheduler and the step builder alone, without a network.

    PYTHONPATH=src python benchmarks/plan.py [--sequences 64 512] [--steps 200]

Prints the median microseconds of processor time that a step of so many decoding sequences takes to schedule, build and
commit; those of a step that preempts many of them because blocks have run out; and those of removing all of them, the
newest first. Where a cost is linear, the microseconds for each sequence do not grow with the number of sequences.
"""

import argparse
import statistics
import time

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts
from saccade.engine.core.kv.manager import BlockManager, PagedBlocks
from saccade.engine.core.schedule import Budgets
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.scheduling import schedule_step
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import StepOutput
from saccade.engine.core.step_builder import StepBuilder
from saccade.models.positions import MultimodalPositions
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 92


def decoding(num_sequences: int, num_blocks_each: int) -> tuple[Scheduler, StepBuilder]:
    """Return a scheduler whose sequences have each drawn their first token."""
    manager = BlockManager(PagedBlocks(num_sequences * num_blocks_each, BLOCK_SIZE), enable_prefix_caching=False)
    budgets = Budgets(num_sequences, NUM_PROMPT_TOKENS * num_sequences, 1024, num_sequences)
    scheduler = Scheduler(budgets, manager, EncoderCache(0), EncodeCosts(lambda _: 1, lambda *_: 1))
    builder = StepBuilder(scheduler.rows, scheduler.encoder_scheduler.encoder_cache)
    for arrival in range(num_sequences):
        token_ids = [(arrival * 7 + index) % 1000 for index in range(NUM_PROMPT_TOKENS)]
        request = EngineRequest(
            request_id=str(arrival), token_ids=token_ids, sampling=SamplingParams(max_tokens=1 << 20)
        )
        scheduler.add_sequence(Sequence(0, request, arrival, arrival, b"", MultimodalPositions([])))
    while scheduler.waiting or any(sequence.num_generated_tokens == 0 for sequence in scheduler.running):
        step(scheduler, builder)
    return scheduler, builder


def step(scheduler: Scheduler, builder: StepBuilder) -> float:
    """Plan and commit a step; return its seconds."""
    began = time.process_time()
    schedule = schedule_step(scheduler)
    plan = builder.build(schedule)
    scheduler.launch(schedule)
    scheduler.commit(schedule, plan, StepOutput(plan.step.number, [1] * len(plan.drawing)))
    scheduler.frames.take_frames()
    return time.process_time() - began


def until_preemption(num_sequences: int) -> float:
    """Return the seconds of the step in which every second sequence needs a block that another one has."""
    scheduler, builder = decoding(num_sequences, NUM_PROMPT_TOKENS // BLOCK_SIZE + 2)
    for sequence in list(scheduler.running)[::2]:
        # As if its answer were longer by all the blocks that are left, and by those of one more sequence.
        sequence.token_ids += [1] * (BLOCK_SIZE * (NUM_PROMPT_TOKENS // BLOCK_SIZE + 2))
        sequence.num_computed_tokens = sequence.num_launched_tokens = sequence.num_tokens - 1
    seconds = step(scheduler, builder)
    assert scheduler.counters.preemptions_total >= num_sequences // 4
    return seconds


def removal(num_sequences: int) -> float:
    """Return the seconds of removing every sequence."""
    scheduler, _ = decoding(num_sequences, NUM_PROMPT_TOKENS // BLOCK_SIZE + 2)
    newest_first = list(scheduler.running)[::-1]
    began = time.process_time()
    for sequence in newest_first:
        scheduler.end_sequence(sequence, FinishReason.ABORT)
    return time.process_time() - began


def main() -> None:
    """Measure each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    for num_sequences in arguments.sequences:
        scheduler, builder = decoding(num_sequences, (NUM_PROMPT_TOKENS + arguments.steps) // BLOCK_SIZE + 3)
        figures = {
            "decode": [step(scheduler, builder) for _ in range(arguments.steps)],
            "preempt": [until_preemption(num_sequences) for _ in range(9)],
            "remove": [removal(num_sequences) for _ in range(9)],
        }
        for name, seconds in figures.items():
            us = 1e6 * statistics.median(seconds)
            print(f"{name:8s} {num_sequences:5d} sequences {us:9.0f} us {us / num_sequences:8.2f} us a sequence")


if __name__ == "__main__":
    main()
