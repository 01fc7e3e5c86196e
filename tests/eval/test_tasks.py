"""The published files of each benchmark, in small: what is asked, and which answers are right."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from tables import table

from saccade.errors import StartupError
from saccade.eval import drawn
from saccade.eval.questions import Question
from saccade.eval.rows import spread
from saccade.eval.tasks import source_of

LETTER = "Answer with the option letter from the given choices directly."
SHORT = "Answer the question using a single word or phrase."


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4), shade).save(file, "PNG")
    return file.getvalue()


A, B = png(0), png(255)
A64, B64 = (base64.b64encode(image).decode() for image in (A, B))


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write *rows* in the format of the file's name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    match file.suffix:
        case ".json":
            file.write_text(json.dumps(rows))
        case ".jsonl":
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case ".tsv":
            cells = ([str(row.get(name, "")).replace('"', '""') for name in rows[0]] for row in rows)
            file.write_text("\n".join("\t".join(f'"{cell}"' for cell in line) for line in (rows[0], *cells)))
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file


def questions(
    *words: object, images: Path | None = None, limit: int | None = None, steps: bool = False
) -> list[Question]:
    return list(source_of([str(word) for word in words], images, limit, steps).questions())


def shape(question: Question) -> tuple[object, ...]:
    return question.name, list(question.categories), list(question.parts), list(question.answers)


def test_ocrbench(tmp_path: Path) -> None:
    kinds = "Regular Text Recognition", "Handwritten Mathematical Expression Recognition"
    rows = [
        {
            "id": 7,
            "question": "what?",
            "answers": "IN",
            "type": kinds[0],
            "dataset_name": "IIIT5K",
            "image_path": "a/1.png",
        }
    ]
    rows.append(rows[0] | {"answers": ["x ^ 2", "y"], "type": kinds[1], "dataset_name": "HME100k"})
    (tmp_path / "images/a").mkdir(parents=True)
    (tmp_path / "images/a/1.png").write_bytes(A)
    first, formula = questions(write(tmp_path / "OCRBench.json", rows), images=tmp_path / "images")
    assert shape(first) == ("7", [kinds[0]], [A, "what?"], ["IN"])
    assert (first.rule("it says in"), formula.rule("$x^2$"), formula.rule("X^2")) == (1, 1, 0)
    table = [{"index": 0, "image": A64, "question": "what?", "answer": "['IN', 'OUT']", "category": kinds[1]}]
    assert shape(*questions(write(tmp_path / "OCRBench.tsv", table))) == ("0", [kinds[1]], [A, "what?"], ["IN", "OUT"])
    row = {
        "dataset": "HME100k",
        "question": "what?",
        "question_type": kinds[1],
        "answer": ["a b"],
        "image": {"bytes": A},
    }
    (only,) = questions("ocrbench", write(tmp_path / "test-00000-of-00001.parquet", [row]))
    assert shape(only) == ("0", [kinds[1]], [A, "what?"], ["a b"])
    assert only.rule("ab") == 1


def test_docvqa(tmp_path: Path) -> None:
    row = {
        "questionId": 5,
        "question": "who?",
        "question_types": ["form", "layout"],
        "image": "documents/p.png",
        "answers": ["Ann", "A"],
    }
    file = write(tmp_path / "docvqa/val_v1.0_withQT.json", [])
    file.write_text(json.dumps({"dataset_name": "SP-DocVQA", "data": [row]}))
    (tmp_path / "docvqa/documents").mkdir()
    (tmp_path / "docvqa/documents/p.png").write_bytes(B)
    (only,) = questions(file)
    assert shape(only) == ("5", ["form", "layout"], [B, f"who?\n{SHORT}"], ["Ann", "A"])
    assert only.rule("Anna") == 0.75
    lines = [
        {"index": index, "image": image, "question": "who?", "answer": "['Ann']"}
        for index, image in ((0, A64 + "=" * 0), (1, "0"))
    ]
    first, second = questions(write(tmp_path / "DocVQA_VAL.tsv", lines))
    assert first.parts == second.parts == [A, f"who?\n{SHORT}"]


def test_chartqa(tmp_path: Path) -> None:
    (tmp_path / "test/png").mkdir(parents=True)
    (tmp_path / "test/png/9.png").write_bytes(A)
    rows = [{"imgname": "9.png", "query": "how many?", "label": "100"}]
    (only,) = questions("chartqa", write(tmp_path / "test/test_human.json", rows))
    assert shape(only) == ("0", ["human"], [A, f"how many?\n{SHORT}"], ["100"])
    assert (only.rule("104"), only.rule("<think>9</think>106")) == (1, 0)
    rows = [
        {"query": "how many?", "label": ["7"], "human_or_machine": side, "image": {"bytes": B, "path": None}}
        for side in (0, 1)
    ]
    asked = questions(write(tmp_path / "chartqa-test.parquet", rows))
    assert [one.categories for one in asked] == [["human"], ["machine"]]


def test_mmmu(tmp_path: Path) -> None:
    row = {
        "question": "<image 1> and <image 2>?",
        "options": "['red', '<image 3>']",
        "answer": "B",
        "question_type": "multiple-choice",
    }
    row |= {
        "id": "validation_Art_Theory_3",
        "image_1": {"bytes": A},
        "image_2": {"bytes": B},
        "image_3": {"bytes": A},
        "image_4": None,
    }
    free = row | {
        "id": "validation_Math_1",
        "question": "How many in <image 1>?",
        "options": "[]",
        "answer": "24",
        "question_type": "open",
    }
    first, second = questions(write(tmp_path / "MMMU/Art/validation-0.parquet", [row, free]))
    letter = "Answer with the option's letter from the given choices directly."
    parts = [A, " and ", B, "?\n\n(A) red\n(B) ", A, f"\n\n{letter}"]
    assert shape(first) == ("validation_Art_Theory_3", ["Art_Theory"], parts, ["B"])
    assert (first.rule("The answer is B."), first.rule("A")) == (1, 0)
    assert second.parts[2:] == ["How many in ", A, f"?\n\n{SHORT}"]
    assert second.rule("So there are 24") == 1
    line = {
        "index": 1,
        "question": "<image 2>?",
        "A": "x",
        "B": "y",
        "answer": "A",
        "category": "Math",
        "image": f"['{A64}', '{B64}']",
    }
    (only,) = questions(
        write(tmp_path / "MMMU_DEV_VAL.tsv", [line | {"split": split} for split in ("dev", "validation")])
    )
    assert shape(only) == ("1", ["Math"], [A, B, f"?\n\n(A) x\n(B) y\n\n{letter}"], ["A"])


def test_mmmu_pro(tmp_path: Path) -> None:
    row = {
        "id": "test_Music_1",
        "question": "Which <image 1>?",
        "options": str(list("klmnopqrst")),
        "answer": "J",
        "subject": "Music",
        "image_1": {"bytes": A},
    }
    file = write(tmp_path / "MMMU_Pro/standard (10 options)/test-0.parquet", [row])
    (only,) = questions(file, steps=True)
    assert shape(only)[:2] == ("test_Music_1", ["Music"])
    assert only.parts[:2] == ["Which ", A]
    assert str(only.parts[2]).startswith("?\nA. k\n")
    assert str(only.parts[2]).endswith("J. t\nAnswer the preceding multiple choice question. The last line of your response should be of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of options. Think step by step before answering.")  # fmt: skip
    assert only.rule("A. no\n\nAnswer: J") == 1
    vision = {
        "id": "test_Music_1",
        "image": {"bytes": B},
        "options": str(list("klmnopqrst")),
        "answer": "J",
        "subject": "Music",
    }
    (only,) = questions(write(tmp_path / "MMMU_Pro/vision/test-0.parquet", [vision]))
    assert only.parts[0] == B
    assert str(only.parts[1]).startswith(f"{LETTER} The last line")
    assert only.rule("Answer: J") == 1


@table(
    ("file", "row", "asked", "right", "wrong"),
    [
        (
            "MathVista/testmini-0.parquet",
            {"pid": "1", "question": "Which?", "choices": ["red", "blue"], "answer": "blue", "image": "images/1.jpg",
             "decoded_image": {"bytes": A}, "question_type": "multi_choice", "metadata": {"task": "figure"}},
            f"Which?\nA. red\nB. blue\n{LETTER}", "B", "A",
        ),
        (
            "MathVista_MINI.tsv",
            {"index": 1, "question": "How far?", "unit": "cm", "answer": "1.2", "image": A64, "question_type": "free_form"},
            f"How far? (Unit: cm)\n{SHORT}", "1.2.", "12",
        ),
        (
            "ai2d/test-0.parquet",
            {"question": "What?", "options": ["cat", "dog"], "answer": "1", "image": {"bytes": A}},
            f"What?\nA. cat\nB. dog\n{LETTER}", "B.", "A",
        ),
        (
            "AI2D_TEST.tsv",
            {"index": 1, "question": "What?", "A": "cat", "B": "dog", "answer": "A", "image": A64},
            f"What?\nA. cat\nB. dog\n{LETTER}", "A", "B",
        ),
        (
            "InfoVQA_VAL.tsv",
            {"index": 1, "question": "Who?", "answer": "['Ann']", "image": A64},
            f"Who?\n{SHORT}", "Ann", "Bob",
        ),
        (
            "textvqa/validation-0.parquet",
            {"question": "What?", "answers": ["The stop."] * 4 + ["go"] * 6, "image": {"bytes": A}},
            f"What?\n{SHORT}", "stop", "halt",
        ),
        (
            "RealWorldQA/test-0.parquet",
            {"question": "How many?\nA. 1\nB. 2\n", "answer": "B", "image": {"bytes": A}},
            f"How many?\nA. 1\nB. 2\n\n{SHORT}", "b.", "A",
        ),
        (
            "MMBench_DEV_EN.tsv",
            {"index": 1, "hint": "Look.", "question": "What?", "A": "x", "B": "y", "answer": "B", "image": A64},
            f"Look.\nWhat?\nA. x\nB. y\n{LETTER}", "B", "A",
        ),
        (
            "MMStar/val.parquet",
            {"index": 1, "question": "What?\nOptions: A: a, b, B: c", "answer": "A", "image": {"bytes": A}},
            f"What?\nA. a, b\nB. c\n{LETTER}", "A", "B",
        ),
        (
            "HallusionBench/image-0.parquet",
            {"question": "Is it?", "gt_answer": "1", "category": "VD", "image": {"bytes": A}},
            "Is it?\nPlease answer yes or no.", "Yes, it is no cat.", "No, yes",
        ),
    ],
)  # fmt: skip
def test_columns_of_other_benchmarks(
    file: str, row: Mapping[str, Any], asked: str, right: str, wrong: str, tmp_path: Path
) -> None:
    (only,) = questions(write(tmp_path / file, [row]))
    assert list(only.parts) == [A, asked]
    assert (only.rule(right), only.rule(wrong)) == (1, 0)


def test_textvqa_counts_how_many_people_agree(tmp_path: Path) -> None:
    row = {"question": "What?", "answers": ["stop", "stop", *("go",) * 8], "image": A64}
    (only,) = questions("textvqa", write(tmp_path / "own.jsonl", [row]))
    assert only.rule("A Stop!") == pytest.approx(0.6)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": "yes", "image": A64, "category": "mine"} for n in range(10)]
    file = write(tmp_path / "mine.jsonl", rows)
    assert [one.number for one in questions("contains", file, limit=4)] == [0, 3, 5, 8]
    assert shape(questions("anls", file)[2]) == ("2", ["mine"], [A, "2?"], ["yes"])
    (only,) = questions("choice", write(tmp_path / "own.jsonl", [rows[0] | {"options": ["yes", "no"], "answer": "A"}]))
    assert only.parts == [A, f"0?\nA. yes\nB. no\n{LETTER}"]


@table(
    ("path", "name"),
    [
        ("DocVQA_VAL.tsv", "docvqa"),
        ("MMMU_Pro_10c.tsv", "mmmu-pro"),
        ("MMMU/Art/validation.parquet", "mmmu"),
        ("MMMU_Pro/vision/test.parquet", "mmmu-pro"),
        ("ocrbench runs/chart_qa/test_human.json", "chartqa"),
    ],
)
def test_the_path_names_the_task(path: str, name: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    assert source_of([str(tmp_path / path)], None, None, has_steps=False).name == name


def test_generated_questions_are_the_same_at_every_call() -> None:
    asked = questions(limit=20)
    assert asked[0].parts == questions(limit=1)[0].parts
    assert len({one.categories[0] for one in asked}) == 10
    assert all(one.rule(f"It is {one.answers[0]}") == 1 for one in asked)
    assert drawn.TOTAL == 1000


@table(
    ("words", "row", "expected"),
    [
        (["docvqa"], None, "needs its files"),
        (["mine.jsonl"], {"question": "q"}, "Which task"),
        (["ocr", "mine.jsonl"], {"question": "q"}, "Which task"),
        (["contains", "nowhere.tsv"], None, "nowhere.tsv is no file"),
        (["contains", "mine.jsonl"], {"question": "q", "image": A64}, "has no answer"),
        (["contains", "mine.jsonl"], {"question": "q", "answers": []}, "has no answer. A test split often has none."),
        (["contains", "mine.jsonl"], {"q": "q", "anser": "a"}, "Its columns are q, anser; the answer is read from"),
        (["contains", "mine.jsonl"], {"q": "q", "answer": "a"}, "Its columns are q, answer; the question is read"),
        (["mathvisat", "mine.jsonl"], {"question": "q"}, "There is no task and no file mathvisat. The tasks are ocr,"),
        (["mathvisat"], None, "There is no task and no file mathvisat."),
        (["contains", "mine.jsonl"], {"question": "q", "answer": "a"}, "has no image"),
        (["contains", "mine.jsonl"], {"question": "q", "answer": "a", "image": "b.png"}, "no image b.png"),
        (["contains", "mine.jsonl"], {"question": "q", "answer": "a", "image": "../a.png"}, "no image ../a.png"),
        (["contains", "mine.tsv"], {"question": "q", "answer": "a", "image": "&"}, "has no image"),
        (["choice", "mine.jsonl"], {"question": "q", "answer": "A", "image": A64}, "has no options"),
        (["contains", "mine.json"], 5, "is not JSON"),
    ],
)
def test_wrong_files(
    words: list[str], row: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a.png").write_bytes(A)
    monkeypatch.chdir(tmp_path / "data")
    if row is not None:
        write(Path(words[-1]), row if isinstance(row, int) else [row])  # type: ignore[arg-type]
    with pytest.raises(StartupError) as error:
        questions(*words)
    assert expected in error.value.message


@pytest.mark.parametrize("limit", [None, 5])
def test_file_without_rows_is_named(limit: int | None, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(StartupError, match=r"mine\.jsonl: there are no rows\."):
        list(spread([tmp_path / "mine.jsonl"], limit))
