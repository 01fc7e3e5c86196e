"""Converts the rows of benchmarks that have their own columns to the columns that all tasks have.

Each benchmark has a function that returns a row with `question`, `answer`, perhaps `options`, and `image`. It reads
rows of the benchmark's own parquet files, and of VLMEvalKit's TSV files, which have the columns A, B and so on.
"""

import re
from collections.abc import Sequence
from typing import Any

from saccade.eval.questions import options_of, texts
from saccade.eval.rows import Row
from saccade.eval.scoring import LETTERS

_LISTED = re.compile(r"\s*\bOptions:\s*(?=A: )")
_LETTER = re.compile(r"(?:^|,\s*|\n)([A-H]): ")
YES_NO = {"0": "No", "1": "Yes"}


def mathvista(row: Row) -> Row:
    """Convert a row of MathVista: the right answer is an option's text, and the image is in a column of its own."""
    options, answer = texts(row.get("choices")), str(row.get("answer") or "")
    metadata = row.get("metadata")
    task = metadata.get("task") if isinstance(metadata, dict) else row.get("task")
    image = row.get("decoded_image") or row.get("image")
    unit = f" (Unit: {row['unit']})" if row.get("unit") else ""
    changed = {"image": image, "question": f"{row.get('question') or ''}{unit}", "task": task, "question_type": None}
    if not options:
        return {**row, **changed, "options": None}
    return {**row, **changed, "options": options, "answer": _letter_of(answer, options)}


def ai2d(row: Row) -> Row:
    """Convert a row of AI2D, whose right answer is an option's index, from 0."""
    answer = str(row.get("answer", ""))
    return {**row, "answer": LETTERS[int(answer)]} if answer.isdigit() and int(answer) < len(LETTERS) else row


def mmbench(row: Row) -> Row:
    """Convert a row of MMBench, whose question may have a hint before it."""
    hint = row.get("hint")
    if not isinstance(hint, str) or hint in ("", "nan"):
        return row
    return {**row, "question": f"{hint}\n{row.get('question')}"}


def mmstar(row: Row) -> Row:
    """Convert a row of MMStar, whose options may be in the question."""
    question, *listed = _LISTED.split(str(row.get("question") or ""), 1)
    if not listed or options_of(row):
        return row
    return {**row, "question": question, "options": [part.strip() for part in _LETTER.split(listed[0])[2::2]]}


def hallusionbench(row: Row) -> Row:
    """Convert a row of HallusionBench, whose right answer is 1 for yes."""
    answer: Any = row.get("gt_answer", row.get("answer"))
    return {**row, "answer": YES_NO.get(str(answer), answer)}


def _letter_of(answer: str, options: Sequence[str]) -> str:
    """Return the letter of the option *answer*, or *answer* if there is no such option."""
    return LETTERS[options.index(answer)] if answer in options else answer
