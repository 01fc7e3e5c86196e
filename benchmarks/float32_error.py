"""The engine's float32 logits and greedy ids beside the reference's: `python -m benchmarks.float32_error`.

The prompts are those of `make conformance`, which holds the differences to a tolerance; this prints how large they are.
"""

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.bfloat16_error import quiet
from benchmarks.measured import ROOT, commit, machine

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

CHUNKS = (16, 2048)


def row(release: str, folder: Path) -> tuple[float, int, int]:
    """Return the largest difference of a logit, how many ids are the reference's greedy choice, and how many in all."""
    import engines
    from conformance.oracle_checks import LONG, PROMPTS
    from references.networks import ORACLES

    oracle = ORACLES[release](folder)
    placeholders = torch.tensor(oracle.placeholder_token_ids)
    answers = [(parts, 64) for parts in LONG] + [(parts, 12) for parts in PROMPTS.values()]
    largest, num_equal, num_ids = 0.0, 0, 0
    for chunk in CHUNKS:
        subject = engines.engine(folder, max_num_batched_tokens=chunk)
        logits_of = engines.record_logits(subject)
        requests = [
            engines.request(folder, parts, str(number), number, max_tokens=length)
            for number, (parts, length) in enumerate(answers)
        ]
        outputs = engines.drain(subject, *requests).answers
        for one in requests:
            token_ids = outputs[one.request_id].token_ids
            both = (torch.stack(logits_of[one.request_id]), oracle.logits(one, token_ids))
            ours, reference = (logits.index_fill(1, placeholders, -1e9) for logits in both)
            largest = max(largest, (ours - reference).abs().max().item())
            num_equal += int((reference.argmax(1) == torch.tensor(token_ids)).sum())
            num_ids += len(token_ids)
    return largest, num_equal, num_ids


def main() -> None:
    """Print a table with a row for each network."""
    torch.set_num_threads(1)
    quiet()
    import checkpoints

    print(f"Machine: {machine()}; 1 thread  \nCommit: {commit()}\n")
    print("| | largest difference of a logit | greedy ids equal |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for release, write in checkpoints.NETWORKS.items():
            largest, num_equal, num_ids = row(release, write(Path(place) / release))
            print(f"| {release} | {largest:.1e} | {num_equal} of {num_ids} |", flush=True)


if __name__ == "__main__":
    main()
