"""Each benchmark's published rule, which scores a text as an answer, from 0 to 1.

Rules that look odd follow the published code, so that scores can be compared with published ones. One rule differs: an
answer that names no option is wrong, and does not get a random option.
"""

import re
from collections.abc import Sequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MIN_ANLS = 0.5
MAX_RELATIVE_ERROR = 0.05
MIN_PEOPLE = 4
"""Of fewer answers none is compared with the others."""

AGREEING = 3
MIN_WORDS = 5
"""An answer with more words than this may name an option by its text."""

KEY_WORDS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)
"""Numbers with commas, with exponents, and plain ones."""


def spoken(text: str) -> str:
    """Return *text* without the reasoning that a server without a reasoning parser leaves in it."""
    return text.rpartition("</think>")[2].strip()


def contains(text: str, answers: Sequence[str]) -> float:
    """Whether *text* contains one of *answers*, ignoring case: OCRBench."""
    line = _one_line(text.lower())
    return float(any(_one_line(answer.lower()) in line for answer in answers))


def contains_formula(text: str, answers: Sequence[str]) -> float:
    """Whether *text* contains one of the formulas, ignoring spaces: OCRBench's formulas."""
    line = _one_line(text).replace(" ", "")
    return float(any(_one_line(answer).replace(" ", "") in line for answer in answers))


def _one_line(text: str) -> str:
    return text.strip().replace("\n", " ")


def exact(text: str, answers: Sequence[str]) -> float:
    """Whether *text* is one of *answers*, ignoring case and final full stops: RealWorldQA, and numbers of MathVista."""
    return float(any(_bare(text) == _bare(answer) for answer in answers))


def _bare(text: str) -> str:
    return text.strip().rstrip(".").strip().lower()


def yes_or_no(text: str, answers: Sequence[str]) -> float:
    """Whether the first yes or no in *text* is the answer: HallusionBench."""
    first = re.search(r"\b(yes|no)\b", text.lower())
    return float(first is not None and first[1] == answers[0].lower())


def vqa(text: str, answers: Sequence[str]) -> float:
    """Return how well *text* agrees with people's *answers*: VQA's accuracy, for TextVQA.

    Among four or more answers, the result is 1 if at least four equal *text*; among fewer, one is enough. Articles and
    punctuation do not count. Source: Antol et al. 2015, arXiv:1505.00468. Its code also writes out numbers and
    contractions, which this rule does not.
    """
    of_people, own = [_plain(answer) for answer in answers], _plain(text)
    if len(of_people) < MIN_PEOPLE:
        return float(own in of_people)
    others = [of_people.count(own) - (one == own) for one in of_people]
    return sum(min(1.0, number / AGREEING) for number in others) / len(others)


def _plain(text: str) -> str:
    words = re.sub(r"(?<!\d)[.,](?!\d)|[;/\[\]\"{}()=+\\_<>@`?!]", " ", text.lower().replace("\n", " ")).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def anls(text: str, answers: Sequence[str]) -> float:
    """Return the average normalised Levenshtein similarity to the nearest answer, or 0 if it is below 0.5: DocVQA."""
    best = 0.0
    for answer in answers:
        a, b = (" ".join(one.lower().split()) for one in (answer, text))
        longest = max(len(answer.upper()), len(text.upper()))
        # The distance is at least the difference in length, which spares the rest for long answers.
        if longest and 1 - abs(len(a) - len(b)) / longest < MIN_ANLS:
            continue
        best = max(best, 1 - _distance(a, b) / longest if longest else 1.0)
    return best if best >= MIN_ANLS else 0.0


def _distance(a: str, b: str) -> int:
    """Return the Levenshtein distance."""
    above = list(range(len(b) + 1))
    for row, letter in enumerate(a, 1):
        here = [row]
        for column, other in enumerate(b, 1):
            here.append(min(above[column - 1] + (letter != other), above[column] + 1, here[-1] + 1))
        above = here
    return above[-1]


def relaxed(text: str, answers: Sequence[str]) -> float:
    """Whether *text* is one of *answers*, or a number within 5 % of one: ChartQA."""
    return float(any(_is_near(text, answer) for answer in answers))


def _is_near(text: str, answer: str) -> bool:
    number, target = _number(text), _number(answer)
    if number is None or not target:
        return text.lower() == answer.lower()
    return abs(number - target) / abs(target) <= MAX_RELATIVE_ERROR


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def chosen(text: str, options: Sequence[str], *, is_pro: bool = False) -> str | None:
    """Return the letter of the option that *text* chooses: MMMU's way, or MMMU-Pro's. None if it names none."""
    letters = LETTERS[: len(options)]
    if is_pro and "Answer:" in text:
        tail = text.rpartition("Answer:")[2]
        if len(named := [letter for letter in letters if letter in tail]) == 1:
            return named[0]
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    for form in ("({})", "{} ", "{}.") if is_pro else ("({})", " {} "):
        if named := [letter for letter in letters if form.format(letter) in text]:
            place = "({})" if form == "({})" else " {} "
            return max(named, key=lambda letter: text.rfind(place.format(letter)))
    if len(text.split()) <= MIN_WORDS:
        return None
    places = [text.lower().rfind(option.lower()) for option in options]
    return letters[places.index(max(places))] if max(places) >= 0 else None


def choice(text: str, answers: Sequence[str], options: Sequence[str], *, is_pro: bool = False) -> float:
    """Whether *text* chooses the option whose letter is one of *answers*: MMMU and MMMU-Pro."""
    return float(chosen(text, options, is_pro=is_pro) in answers)


def open_answer(text: str, answers: Sequence[str]) -> float:
    """Whether a key phrase of *text*, or a number in it, has one of *answers*: MMMU's open questions."""
    phrases = _key_phrases(text.strip().strip(".").lower())
    numbers = [number for phrase in phrases for form in NUMBERS for number in re.findall(form, phrase)]
    expected = {value for answer in answers for value in _values(answer)}
    words = [value for value in expected if isinstance(value, str)]
    return float(
        any(
            any(word in value for word in words) if isinstance(value, str) else value in expected
            for part in (*phrases, *numbers)
            for value in _values(part)
        )
    )


def _key_phrases(text: str) -> list[str]:
    """Return the shortest end of each line after one of KEY_WORDS, or the text if there is none."""
    phrases, lines = [], text.split("\n")
    for index, line in enumerate(lines):
        shortest = ""
        for word in KEY_WORDS if index < len(lines) - 1 else (*KEY_WORDS, "="):
            end = line.rpartition(word)[2].strip()
            if word in line and (not shortest or len(end) < len(shortest)):
                shortest = end
        if shortest and shortest not in set(":,.!?;'"):
            phrases.append(shortest)
    return phrases or [text]


def _values(text: str) -> list[str | float]:
    """Return the number that *text* is, with two decimals, or the words to look for."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]
