"""The report as one self-contained HTML file: the scores, and the wrong answers with their images."""

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape

from PIL import Image

from saccade.bench import page as bench_page
from saccade.eval.ask import ScoredAnswer
from saccade.eval.questions import Question, data_url
from saccade.eval.report import Rate, Report
from saccade.eval.rows import is_taken
from saccade.eval.tasks import Source

MAX_QUESTIONS = 200
MAX_SIDE = 800
STYLE = f"""{bench_page.STYLE}
article{{border-top:1px solid var(--line);padding:1em 0;display:grid;grid-template-columns:minmax(0,2fr) 3fr;gap:1.5em}}
img{{max-width:100%;background:#fff;margin:0 0 6px}}p{{margin:0 0 .5em;white-space:pre-wrap;overflow-wrap:anywhere}}
small{{color:var(--faint)}}.right{{color:#2e9e6b}}.wrong{{color:#d04a4a}}
"""


def cells(result: Report) -> Iterator[list[str]]:
    """Yield the cells of the table's lines, the header first."""
    labels = "AB"[: len(result.servers)] if len(result.servers) > 1 else ["score, %"]
    yield ["", "questions", *labels, *(["B - A, points"] if len(result.servers) > 1 else [])]
    for line in result.lines:
        scores = [str(one) if one else "-" for one in line.scores]
        if len(result.servers) > 1:
            scores.append(_difference(line.difference))
        yield [line.name, str(line.num), *scores]


def _difference(rate: Rate | None) -> str:
    if rate is None:
        return "-"
    if rate.low == rate.high == 0:
        return "the same"
    return f"{rate}, not distinguishable" if rate.low <= 0 <= rate.high else str(rate)


def page(result: Report, source: Source) -> str:
    """Return the whole file."""
    parts = [f"<!doctype html><meta charset=utf-8><title>saccade eval</title><style>{STYLE}</style>"]
    parts.append(f"<h1>{escape(source.title)}</h1>")
    for label, server in zip("AB", result.servers, strict=False):
        words = f"{label}: {server['root']}, {server['model']} {server['version']}"
        parts.append(f"<p>{escape(words)}</p>")
    parts.append("<table>")
    parts += ["<tr>" + "".join(f"<td>{escape(cell)}" for cell in line) for line in cells(result)]
    parts += ["</table>", *(f"<p>{escape(note)}</p>" for note in result.notes)]
    wrong = _wrong(result.answers)
    listed = _some(wrong)
    parts.append(f"<h2>Wrong answers: {len(wrong)} questions, {len(listed)} of them here</h2>")
    parts += (_article(one, result.answers) for one in source.questions() if one.number in listed)
    return "\n".join((*parts, f"<pre>{escape(f'{result.settings} {result.versions}')}</pre>"))


def _wrong(sides: Sequence[Sequence[ScoredAnswer]]) -> dict[int, bool]:
    """Return the numbers of questions with a wrong answer, and whether all their scores are the same."""
    scores: dict[int, set[float]] = {}
    for one in (one for side in sides for one in side if one.error is None):
        scores.setdefault(one.number, set()).add(one.score)
    return {number: len(values) == 1 for number, values in scores.items() if values != {1.0}}


def _some(wrong: Mapping[int, bool]) -> set[int]:
    """Return at most MAX_QUESTIONS: first those with different scores, then some of the others, evenly spread."""
    different = [number for number, is_same in wrong.items() if not is_same][:MAX_QUESTIONS]
    others = [number for number, is_same in wrong.items() if is_same]
    is_listed = partial(is_taken, len(others), MAX_QUESTIONS - len(different))
    return {*different, *(number for index, number in enumerate(others) if is_listed(index))}


def _article(question: Question, sides: Sequence[Sequence[ScoredAnswer]]) -> str:
    images = "".join(f'<img src="{_small(part)}">' for part in question.parts if isinstance(part, bytes))
    text = "".join(part for part in question.parts if isinstance(part, str))
    parts = [
        f"<article><div>{images}</div><div><small>{escape(', '.join((question.name, *question.categories)))}</small>"
    ]
    parts += [f"<p>{escape(text)}</p>", f"<p><small>right:</small> {escape(' or '.join(question.answers))}</p>"]
    for label, side in zip("AB", sides, strict=False):
        for one in (one for one in side if one.number == question.number):
            style = "right" if one.score == 1 else "wrong"
            answer = one.text or one.error or "(no text)"
            parts.append(f'<p class="{style}"><small>{label}, {one.score:.2g}:</small> {escape(answer)}</p>')
    return "".join((*parts, "</div></article>"))


def _small(image: bytes) -> str:
    """Return an image as a `data:` URL, small enough for a page to have many of them."""
    with Image.open(io.BytesIO(image)) as pixels:
        if max(pixels.size) <= MAX_SIDE:
            return data_url(image)
        small, file = pixels.convert("RGB"), io.BytesIO()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    small.save(file, "JPEG", quality=80)
    return data_url(file.getvalue())
