"""What bfloat16 costs the logits of every network: `python -m benchmarks.bfloat16_error`.

The engine's and transformers' logits are compared with transformers' in float64, on the tests' tiny checkpoints with
random weights (tests/support/engines/bfloat16_errors.py).
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.measured import ROOT, commit, machine

sys.path += [str(ROOT / "tests"), *map(str, (ROOT / "tests" / "support").iterdir())]

from torchvision_schemas import import_torchvision

PROMPTS: Mapping[str, list[list[Any]]] = {
    "text": [[length] for length in (11, 23, 37, 53, 71, 97, 131, 150)],
    "images": [[5, ((192, 128), seed), 9, ((96, 160), seed + 10), 4] for seed in range(8)],
}
NUM_TOKENS = 16


def quiet() -> None:
    """Keep transformers' progress bars and deprecations, and our own log, out of the table."""
    warnings.simplefilter("ignore")
    import_torchvision()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def main() -> None:
    """Print a table with a row for each network and kind of prompt."""
    torch.set_num_threads(1)
    quiet()
    import checkpoints
    from bfloat16_errors import errors

    print(f"Machine: {machine()}; 1 thread  \nCommit: {commit()}\n")
    print("| | prompts | engine: mean | largest | transformers: mean | largest | transformers in float32: largest |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for release, write in checkpoints.NETWORKS.items():
            folder = write(Path(place) / release)
            for kind, prompts in PROMPTS.items():
                ours, reference, float32 = errors(release, folder, prompts, NUM_TOKENS)
                cells = [f"{value:.4f}" for error in (ours, reference) for value in error]
                print("|", " | ".join([release, kind, *cells, f"{float32.largest:.0e}"]), "|", flush=True)


if __name__ == "__main__":
    main()
