"""Structured output: `python -m benchmarks.structured answers [NUMBER]`, `masks`, or `masks --xgrammar`."""

import argparse

import torch

from benchmarks.measured import commit, machine
from benchmarks.structured import answers, masks

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("what", choices=("answers", "masks"))
parser.add_argument("number", type=int, nargs="?", default=10_000)
parser.add_argument("--xgrammar", action="store_true", help="measure xgrammar's masks, too")
arguments = parser.parse_args()
torch.set_num_threads(1)
print(f"Machine: {machine()}; 1 thread  \nCommit: {commit()}\n")
if arguments.what == "answers":
    answers.report(arguments.number)
else:
    masks.report()
    if arguments.xgrammar:
        from benchmarks.structured import xgrammar_masks

        print("\n## xgrammar\n")
        xgrammar_masks.report()
