"""Scores answers by the rules of lm-eval and lmms-eval: `python judge.py FOLDER`, where both are unpacked.

It reads a JSON list of [rule, text, answers, options] from stdin, and writes a list of scores. The packages' modules
are loaded by their paths, since their dependencies are large; what they import besides is replaced by nothing.
"""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

UNKNOWN = "?"


def load(path: Path) -> Any:
    """Import the module at *path*."""
    spec = importlib.util.spec_from_file_location("_".join(path.parts[-3:-1]), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace(*names: str) -> None:
    """Let modules be imported that are not installed. Decorators of theirs return the function."""
    for name in names:
        module = ModuleType(name)
        module.__getattr__ = lambda _: lambda *_args, **_options: lambda function: function
        sys.modules[name] = module


def main() -> None:
    folder = Path(sys.argv[1])
    replace("sacrebleu", "loguru", "lmms_eval", "lmms_eval.api", "lmms_eval.api.registry")
    replace("lmms_eval.tasks", "lmms_eval.tasks._task_utils", "lmms_eval.tasks._task_utils.file_utils")
    tasks = folder / "lmms_eval/tasks"
    mmmu = load(folder / "lm_eval/tasks/mmmu/utils.py")
    pro = load(tasks / "_task_utils/mmmu_mcq_utils.py").parse_mmmu_multi_choice_response
    metrics = load(folder / "lmms_eval/api/metrics.py")
    chartqa, ocrbench = load(tasks / "chartqa/utils.py"), load(tasks / "ocrbench/utils.py")

    def letters(options: list[str]) -> tuple[list[str], dict[str, str]]:
        by_letter = dict(zip("ABCDEFGHIJ", options, strict=False))
        return list(by_letter), by_letter

    def ocr(text: str, answers: list[str], dataset: str) -> float:
        row = {"answer": answers, "dataset": dataset, "question_type": ""}
        return ocrbench.ocrbench_process_results(row, [text])["ocrbench_accuracy"]["score"]

    rules = {
        "contains": lambda text, answers, _: ocr(text, answers, "IIIT5K"),
        "contains_formula": lambda text, answers, _: ocr(text, answers, "HME100k"),
        "anls": lambda text, answers, _: metrics.anls(answers, [text])["anls"],
        "relaxed": lambda text, answers, _: max(chartqa.relaxed_correctness(text, answer) for answer in answers),
        "mmmu": lambda text, answers, options: mmmu.parse_multi_choice_response(text, *letters(options)) in answers,
        "mmmu-pro": lambda text, answers, options: pro(text, *letters(options)) in answers,
        "open_answer": lambda text, answers, _: mmmu.eval_open(answers, mmmu.parse_open_response(text)),
    }
    with mock.patch.object(random, "choice", return_value=UNKNOWN):  # what they choose if they find no option
        print(json.dumps([float(rules[rule](text, *rest)) for rule, text, *rest in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
