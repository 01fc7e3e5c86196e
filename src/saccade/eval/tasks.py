"""The benchmarks by name: their columns, the words after a question, and the rule that scores its answers."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from saccade.errors import StartupError
from saccade.eval import drawn, published_rows, scoring
from saccade.eval.questions import Question, categories_of, first, options_of, parts_of, texts
from saccade.eval.rows import Row, files_of, is_taken, spread

DRAWN = "ocr"
PUBLISHED = (
    *("ocrbench", "docvqa", "chartqa", "mmmu-pro", "mmmu"),
    *("mathvista", "ai2d", "infovqa", "textvqa", "realworldqa", "mmbench", "mmstar", "hallusionbench"),
)
ANSWERS = ("answers", "answer", "label")
"""The columns with the right answer, of which the first that is there counts."""

TEXTS = ("question", "query")
"""The columns with the question. MMMU-Pro's images have theirs drawn in them, so questions with options need none."""

MAX_COLUMNS = 300
"""Characters of the names of a file's columns in an error."""

FORMULAS = frozenset({"HME100k", "Handwritten Mathematical Expression Recognition"})

# The prompts of the benchmarks, word for word: scores with others could not be compared with published ones.
SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option letter from the given choices directly."
YES_NO = "Please answer yes or no."
MMMU_LETTER = "Answer with the option's letter from the given choices directly."
LAST_LINE = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without quotes) where LETTER "
    "is one of options."
)
THINK = f"{LAST_LINE} Think step by step before answering."
STEPS = f"Answer the preceding multiple choice question. {THINK}"
VISION = f"{LETTER} {LAST_LINE}"
VISION_STEPS = f"Write out the multiple-choice question in the image and then solve it. {THINK}"


class Task(NamedTuple):
    """A benchmark: *columns* may have a row's category, *prompt* follows the question.

    Without a *rule* its questions have options, or are MMMU's open ones. *open_rule* is for its questions without
    options. *read* returns a published row in the columns of all tasks.
    """

    rule: Callable[[str, Sequence[str]], float] | None
    columns: Sequence[str] = ("category",)
    prompt: str = ""
    open_rule: Callable[[str, Sequence[str]], float] | None = None
    read: Callable[[Row], Row] = dict


TASKS = {
    "ocr": Task(scoring.contains, ("type",)),
    "ocrbench": Task(scoring.contains, ("type", "question_type", "category")),
    "docvqa": Task(scoring.anls, ("question_types", "category"), SHORT),
    "chartqa": Task(scoring.relaxed, ("type", "split", "human_or_machine"), SHORT),
    "mmmu-pro": Task(None, ("subject", "category"), LETTER),
    "mmmu": Task(None, ("subject", "category"), MMMU_LETTER),
    "mathvista": Task(None, ("task", "category"), LETTER, scoring.exact, published_rows.mathvista),
    "ai2d": Task(None, ("category",), LETTER, read=published_rows.ai2d),
    "infovqa": Task(scoring.anls, ("answer_type", "category"), SHORT),
    "textvqa": Task(scoring.vqa, ("category",), SHORT),
    "realworldqa": Task(None, ("category",), LETTER, scoring.exact),
    "mmbench": Task(None, ("l2-category", "L2-category", "category"), LETTER, read=published_rows.mmbench),
    "mmstar": Task(None, ("category",), LETTER, read=published_rows.mmstar),
    "hallusionbench": Task(scoring.yes_or_no, ("category",), YES_NO, read=published_rows.hallusionbench),
    "contains": Task(scoring.contains),
    "anls": Task(scoring.anls),
    "relaxed": Task(scoring.relaxed),
    "choice": Task(None, prompt=LETTER),
}
"""ocr is drawn here; the last four are for files of your own."""


class Source(NamedTuple):
    """The questions of the task *name*, from *files*, or generated ones if there are none.

    *images* is the folder of images that the files name. *limit* takes that many questions, spread evenly over all.
    *has_steps* asks for steps of reasoning before the answer.
    """

    name: str
    files: Sequence[Path] = ()
    images: Path | None = None
    limit: int | None = None
    has_steps: bool = False

    @property
    def title(self) -> str:
        """The task's name, and where its questions come from."""
        return self.name if self.files else f"{self.name}: questions that were drawn here, not those of OCRBench"

    def questions(self) -> Iterator[Question]:
        """Yield the questions; every call reads the files again. Raises StartupError."""
        if self.files:
            for number, file, row in spread(self.files, self.limit):
                yield self._question(number, file, row)
        else:
            for number in filter(partial(is_taken, drawn.TOTAL, self.limit), range(drawn.TOTAL)):
                yield self._question(number, Path(), drawn.row(number))

    def _question(self, number: int, file: Path, row: Row) -> Question:
        task = TASKS[self.name]
        row = task.read(row)
        answers = texts(first(row, *ANSWERS))
        if answers in ([], ["?"]):
            raise StartupError(f"Row {number + 1} of {file} has no answer. {_why_no_answer(row)}")
        if task.rule is not None and row.keys().isdisjoint(TEXTS):
            raise StartupError(f"Row {number + 1} of {file} has no question. {_where_it_is(row, 'question', TEXTS)}")
        name, text = first(row, "id", "questionId", "question_id", "index"), first(row, *TEXTS) or ""
        options, is_open = options_of(row), row.get("question_type") == "open"
        categories, rule, prompt = categories_of(row, task.columns, file), task.rule, task.prompt
        if rule is None and is_open:
            rule, prompt = scoring.open_answer, SHORT
        elif rule is None and not options and task.open_rule is not None:
            rule, prompt = task.open_rule, SHORT
        elif rule is None and not options:
            raise StartupError(f"Row {number + 1} of {file} has no options.")
        elif rule is None:
            rule = partial(scoring.choice, options=options, is_pro=self.name != "mmmu")
            direct, steps = (prompt, STEPS) if text else (VISION, VISION_STEPS)
            prompt = steps if self.has_steps else direct
        elif rule is scoring.contains and not FORMULAS.isdisjoint((*categories, row.get("dataset_name"))):
            rule = scoring.contains_formula
        return Question(
            number,
            str(number if name is None else name),
            categories,
            parts_of(_prompt(self.name, text, [] if is_open else options, prompt), row, self.images or file.parent),
            answers,
            lambda text: rule(scoring.spoken(text), answers),
        )


def _why_no_answer(row: Row) -> str:
    if not row.keys().isdisjoint(ANSWERS):
        return "A test split often has none."
    return _where_it_is(row, "answer", ANSWERS)


def _where_it_is(row: Row, what: str, columns: Sequence[str]) -> str:
    return f"Its columns are {', '.join(map(str, row))[:MAX_COLUMNS]}; the {what} is read from {', '.join(columns)}."


def _prompt(name: str, question: str, options: Sequence[str], prompt: str) -> str:
    """Return the whole text. Without a question, as in MMMU-Pro's vision split, the image shows the options too."""
    form, between = ("({}) {}", "\n\n") if name == "mmmu" else ("{}. {}", "\n")
    listed = "\n".join(map(form.format, scoring.LETTERS, options if question else ()))
    return between.join(filter(None, (question, listed, prompt)))


def source_of(words: Sequence[str], images: Path | None, limit: int | None, has_steps: bool) -> Source:
    """Return the source that *words* name: a task, files or folders, or a task and then files.

    If no word names the task, the first file's path must contain its name, as `data/DocVQA_VAL.tsv` does. Raises
    StartupError.
    """
    names = [word for word in words[:1] if word in TASKS]
    if words and not names and re.fullmatch(r"[\w-]+", words[0]) and not Path(words[0]).exists():
        raise StartupError(f"There is no task and no file {words[0]}. The tasks are {', '.join(TASKS)}.")
    files = [file for word in words[len(names) :] for file in files_of(Path(word))]
    if not files and names in ([], [DRAWN]):
        return Source(DRAWN, (), images, limit, has_steps)
    if not files:
        raise StartupError(f"{names[0]} needs its files, which are not downloaded: `saccade eval URL {names[0]} FILE`.")
    path = re.sub(r"[^a-z0-9]", "", str(files[0].absolute()).lower())
    places = {name: path.rfind(name.replace("-", "")) for name in PUBLISHED}
    name = names[0] if names else max(places, key=places.__getitem__)
    if name == DRAWN or (not names and places[name] < 0):
        raise StartupError(f"Which task has {files[0]}? Name it before the file: {', '.join(TASKS)}.")
    return Source(name, files, images, limit, has_steps)
