"""The rules of the benchmarks: examples, and the same scores as other programs have for a thousand answers each."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tables import table

from saccade.eval import scoring

JUDGE = Path(__file__).with_name("judge.py")
JUDGES = ("lm-eval==0.4.13", "lmms-eval==0.7.3")
WORDS = [
    "red",
    "Blue",
    "the",
    "exit",
    "STOP",
    "中文",
    "a",
    "B",
    "C",
    "café",
    "street",
    "12",
    "3.5",
    "42%",
    "-7",
    "1,250",
    "1e3",
    ".5",
    "0",
    "final",
    "answer",
    "90",
    "91",
    "1930",
]
BEFORE = ("", "", "So the final answer is ", "x = ", "It could be ", "This is not so \n", "The ")
AFTER = ("", "", ".", " \n", "!", ", I think")
SHAPES = ("{a}", "({a})", "{a}.", "{a}. {t}", "The answer is {a}", "not ({b}) but ({a})", "{b} or {a} ", "{t}", "I think that it must be {t} or {w}")  # fmt: skip
NUM_ANSWERS = 1000
RULES = {
    "contains": lambda text, answers, _: scoring.contains(text, answers),
    "contains_formula": lambda text, answers, _: scoring.contains_formula(text, answers),
    "anls": lambda text, answers, _: scoring.anls(text, answers),
    "relaxed": lambda text, answers, _: scoring.relaxed(text, answers),
    "mmmu": lambda text, answers, options: scoring.choice(text, answers, options),
    "mmmu-pro": lambda text, answers, options: scoring.choice(text, answers, options, is_pro=True),
    "open_answer": lambda text, answers, _: scoring.open_answer(text, answers),
}
Item = tuple[str, str, list[str], list[str]]


def phrase(rng: random.Random, count: int) -> str:
    return rng.choice((" ", " ", "\n", ". ", ", ")).join(rng.choices(WORDS, k=count))


def misspelt(rng: random.Random, text: str) -> str:
    letters = list(text)
    for _ in range(rng.randint(0, 3)):
        letters[rng.randrange(len(letters))] = rng.choice(("", "x", " ", "0", "\n"))
    return "".join(letters) or "x"


def near(rng: random.Random, answer: str) -> str:
    """Return a number near *answer*, or *answer*."""
    number = answer.rstrip("%")
    try:
        return f"{float(number) * rng.choice((1, 0.96, 1.04, 1.06)):g}{answer[len(number) :]}"
    except ValueError:
        return answer.swapcase()


def item(rule: str, rng: random.Random) -> Item:
    """Return an answer as models give them: right, nearly right, with words around it, or about something else."""
    answers = [phrase(rng, 1 if rule == "relaxed" else rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
    options = [phrase(rng, rng.randint(1, 2)) for _ in range(rng.randint(2, 10))]
    letter, other = rng.choices("ABCDEFGHIJ"[: len(options)], k=2)
    core = misspelt(rng, rng.choice(answers))
    if rule.startswith("mmmu"):
        answers = [letter]
        core = rng.choice(SHAPES).format(a=letter, b=other, t=options[ord(other) - 65], w=rng.choice(options))
    before, after = rng.choice(BEFORE), rng.choice((*AFTER, f" {phrase(rng, 4)}"))
    if rule == "relaxed" and rng.random() < 0.7:
        before, core, after = "", near(rng, rng.choice(answers)), ""
    return rule, f"{before}{core}{after}".strip(), answers, options


def judged(items: Sequence[Item], folder: Path) -> list[float]:
    command = [sys.executable, str(JUDGE), str(folder)]
    run = subprocess.run(command, input=json.dumps(items), capture_output=True, text=True, check=True)
    scores: list[float] = json.loads(run.stdout)
    return scores


@table(
    ("score", "expected"),
    [
        (scoring.contains("It reads:\nEXIT only", ["exit"]), 1.0),
        (scoring.contains("exit", ["e xit"]), 0.0),
        (scoring.contains_formula("$x^{2}$", ["x ^ { 2 }"]), 1.0),
        (scoring.contains_formula("$X^{2}$", ["x ^ { 2 }"]), 0.0),
        (scoring.anls("Edward Shanon", ["Edward R. Shannon", "Edward Shannon"]), 1 - 1 / 14),
        (scoring.anls("a" * 10_000, ["Edward"]), 0.0),
        (scoring.relaxed("104", ["100"]), 1.0),
        (scoring.relaxed("106", ["100"]), 0.0),
        (scoring.relaxed("12%", ["0.12"]), 1.0),
        (scoring.relaxed("Yes.", ["Yes"]), 0.0),
        (scoring.chosen("(A) is wrong, so (C)", ["x", "y", "z"]), "C"),
        (scoring.chosen("I have no idea", ["x", "y"]), None),
        (scoring.chosen("A or B?\nAnswer: $B", ["x", "y"], is_pro=True), "B"),
        (scoring.chosen("It is the second of the two, the zebra", ["horse", "zebra"]), "B"),
        (scoring.open_answer("So the sum is 1,234.5", ["1234.50"]), 1.0),
        (scoring.spoken("<think>A? No.</think>\n B \n"), "B"),
        (scoring.spoken("B"), "B"),
    ],
)
def test_examples(score: object, expected: object) -> None:
    assert score == expected


@pytest.mark.ci  # it installs the judges
def test_other_programs_give_the_same_scores(tmp_path: Path) -> None:
    folder = tmp_path / "judges"
    install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", folder, *JUDGES)
    subprocess.run(install, check=True)
    for rule, score in RULES.items():
        rng = random.Random(rule)
        items = [item(rule, rng) for _ in range(NUM_ANSWERS)]
        scores = [score(*rest) for _, *rest in items]
        expected = judged(items, folder)
        different = [
            (one, mine, other) for one, mine, other in zip(items, scores, expected, strict=True) if mine != other
        ]
        assert different == [], rule
        assert 0.1 * NUM_ANSWERS < sum(map(bool, scores)) < 0.95 * NUM_ANSWERS, rule
