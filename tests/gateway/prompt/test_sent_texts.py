"""The search for a request's texts takes time that grows with the prompt, whatever form the template writes. # F13"""

import json
from typing import Any

from tables import table

from saccade.gateway.prompt.sent_texts import HEAD_CHARACTERS, check_sent_texts


class CountedText(str):
    """A text that counts how many characters it is searched through."""

    num_searched = 0

    def find(self, sub: str, start: Any = 0, stop: Any = None) -> int:
        found = super().find(sub, start, stop)
        end = min(len(self), len(self) if stop is None else stop)
        self.num_searched += (end if found < 0 else found + len(sub)) - start
        return found


FORMS = {
    "as they are": str,
    "as JSON": lambda text: json.dumps(text, ensure_ascii=False),
    "as JSON in ASCII": json.dumps,
}
TEXTS = {
    "unlike one another": [f"{number}\n" + "é" * 500 for number in range(400)],
    "alike": ["a" * 300 + "\n" + "é" * 300] * 400,
    "longer and longer": ["a" * number + "\né" for number in range(1, 400)],
}


@table("written", FORMS.values(), ids=FORMS)
@table("texts", TEXTS.values(), ids=TEXTS)
def test_the_search_grows_with_the_prompt(texts: list[str], written: Any) -> None:
    prompt = CountedText("".join(f"<|user|>{written(text)}" for text in texts))
    check_sent_texts([{"role": "user", "content": text} for text in texts], prompt, "", results_first=False)
    assert prompt.num_searched < 10 * len(prompt) + 4000 * len(texts)


def test_a_long_text_is_found_by_its_head() -> None:
    """A search for the whole text would hold the interpreter's lock for tenths of a second."""
    text = "word " * 100_000
    prompt = CountedText(f"<|user|>{text}<|end|>")
    check_sent_texts([{"role": "user", "content": text}], prompt, "", results_first=False)
    assert prompt.num_searched < 10 * HEAD_CHARACTERS


def test_no_form_is_looked_for_twice_in_the_same_part() -> None:
    class NotedText(str):
        searches: list[tuple[str, int]]

        def find(self, sub: str, start: Any = 0, stop: Any = None) -> int:
            self.searches.append((sub, stop))
            return super().find(sub, start, stop)

    text = 'a "b" é'
    for written in (text, "x" * 300 + text, "x" * 5000 + r"a \"b\" \u00e9"):
        prompt = NotedText(written)
        prompt.searches = []
        check_sent_texts([{"role": "user", "content": text}], prompt, "", results_first=False)
        assert len(prompt.searches) == len(set(prompt.searches)) > 0
