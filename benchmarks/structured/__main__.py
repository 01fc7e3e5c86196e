"""Structured output: `python -m benchmarks.structured answers [NUMBER]` and `python -m benchmarks.structured masks`."""

import argparse

import torch

from benchmarks.measured import commit, machine
from benchmarks.structured import answers, masks

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("what", choices=("answers", "masks"))
parser.add_argument("number", type=int, nargs="?", default=10_000)
arguments = parser.parse_args()
torch.set_num_threads(1)
print(f"Machine: {machine()}; 1 thread  \nCommit: {commit()}\n")
if arguments.what == "answers":
    answers.report(arguments.number)
else:
    masks.report()
