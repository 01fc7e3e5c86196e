"""Train the bundled demonstration model, or measure one.

python scripts/train_demo train --work RUN --out MODEL
python scripts/train_demo evaluate --model MODEL --json evaluation.json
"""

import argparse
import json
import os
import sys
from pathlib import Path

from pictures import KEPT_OUT_FONT, TRAINING_FONTS, missing_fonts

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nothing here needs torchvision, and one that does not fit the installed torch would keep transformers from loading.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]


def _train(arguments: argparse.Namespace) -> None:
    from plan import Plan
    from train import Trainer

    plan = Plan(
        seed=arguments.seed,
        eye_steps=arguments.eye_steps,
        steps=arguments.steps,
        threads=arguments.threads,
        compiled=not arguments.eager,
    )
    Trainer(plan, arguments.work, arguments.out).run()


def _evaluate(arguments: argparse.Namespace) -> None:
    import torch
    from evaluate import evaluate

    torch.set_num_threads(arguments.threads)
    result = evaluate(arguments.model, arguments.count, arguments.seed)
    progress = arguments.work / "progress.json" if arguments.work else None
    if progress and progress.is_file():
        result["training"] = json.loads(progress.read_text())
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def _report_missing_fonts() -> None:
    for name, package in missing_fonts((*TRAINING_FONTS, KEPT_OUT_FONT)).items():
        print(f"font {name} is missing and left out: apt-get install {package}", file=sys.stderr)


def main() -> None:
    """Read the arguments and run one command."""
    parser = argparse.ArgumentParser(
        prog="train_demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, continuing from the newest checkpoint in --work")
    train.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    train.add_argument("--out", type=Path, required=True, help="folder for the hub layout")
    train.add_argument("--eye-steps", type=int, default=2700, help="steps of the vision tower alone")
    train.add_argument("--steps", type=int, default=6500, help="all steps")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--threads", type=int, default=1)
    train.add_argument("--eager", action="store_true", help="without torch.compile, which wants a C++ compiler")
    train.set_defaults(run=_train)
    measure = commands.add_parser("evaluate", help="exact answers on fresh pictures, by transformers")
    measure.add_argument("--model", type=Path, required=True, help="folder in hub layout")
    measure.add_argument("--work", type=Path, help="folder of the checkpoint, to add the facts of the training")
    measure.add_argument("--json", type=Path, help="file for the result")
    measure.add_argument("--count", type=int, default=500, help="pictures a kind")
    measure.add_argument("--seed", type=int, default=1_000_000, help="number of the first picture")
    measure.add_argument("--threads", type=int, default=1)
    measure.set_defaults(run=_evaluate)
    arguments = parser.parse_args()
    _report_missing_fonts()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
