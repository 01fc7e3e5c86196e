"""Markdown of answers on the page: what becomes which node, and what hostile or unfinished answers cannot do."""

from typing import TYPE_CHECKING

import pytest
from conftest import Opened, Site, answer_chats
from tables import table

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

HTML = "text => { const place = document.createElement('div'); drawMarkdown(place, text); return place.innerHTML; }"
CODE = "text => { const place = document.createElement('div'); drawMarkdown(place, text); return " + (
    "[...place.querySelectorAll('pre')].map((one) => one.textContent); }"
)
LINK = '<a href="{0}" title="{0}" rel="noopener noreferrer" target="_blank">{1}</a>'

NODES = {
    "paragraphs": ("one\nline\n\ntwo", "<p>one\nline</p><p>two</p>"),
    "headings": ("# A #\n###### B", "<h3>A</h3><h6>B</h6>"),
    "bold and italics": ("**a** *b* __c__ _d_ ***e*** ~~f~~", "<p><strong>a</strong> <em>b</em> <strong>c</strong> "
                         "<em>d</em> <strong><em>e</em></strong> <del>f</del></p>"),
    "bold in italics": ("*a **b***", "<p><em>a <strong>b</strong></em></p>"),
    "marks that are no marks": ("2 * 3 * 4, a_b_c, **open", "<p>2 * 3 * 4, a_b_c, **open</p>"),
    "inline code": ("`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
    "escapes": (r"\*a\* 1\. \n", r"<p>*a* 1. \n</p>"),
    "list": ("- a\n- b\n  c\n\n- d", "<ul><li><p>a</p></li><li><p>b\nc</p></li><li><p>d</p></li></ul>"),
    "list within a list": ("1. a\n  - b\n    - c\n2. d", "<ol><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul>"
                           "</li></ul></li><li><p>d</p></li></ol>"),
    "list from a number": ("3. a", '<ol start="3"><li><p>a</p></li></ol>'),
    "quote": ("> a\n> - b", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote>"),
    "rule": ("a\n\n---", "<p>a</p><hr>"),
    "link": ("[a](https://x.example/b_c_(d))", "<p>" + LINK.format("https://x.example/b_c_(d)", "a") + "</p>"),
    "address": ("See https://x.example.", "<p>See <span>" + LINK.format(*["https://x.example"] * 2) + "</span>.</p>"),
    "address in angles": ("<https://x.example>", "<p>" + LINK.format(*["https://x.example"] * 2) + "</p>"),
    "formula": (r"\(a_b\) $x*y*z$", r'<p><code class="tex">\(a_b\)</code> <code class="tex">$x*y*z$</code></p>'),
    "prices": ("from $5 to $6", "<p>from $5 to $6</p>"),
}  # fmt: skip

HOSTILE = (
    "<img src=x onerror=hacked()>",
    "<script>hacked()</script>",
    "[x](javascript:hacked())",
    "[x](JaVaScRiPt:hacked())",
    "[x](data:text/html,<script>hacked()</script>)",
    "[x]( //elsewhere.example)",
    "[x](https://)",
    "![x](javascript:hacked())",
    "<a href='javascript:hacked()'>x</a>",
    "<javascript:hacked()>",
    "| <img src=x onerror=hacked()> |\n|---|\n| <b>x</b> |",
    "```<img src=x onerror=hacked()>\n</code></pre><img src=x onerror=hacked()>",
    "- > # <svg onload=hacked()>",
    '[x](https://a.example "\' onclick=hacked()")',
    "[<img src=x onerror=hacked()>](https://a.example/\"onclick='hacked()')",
)

FENCES = {
    "nested": ("````md\n```py\na\n```\n````\nb", ["```py\na\n```"]),
    "of waves around backticks": ("~~~\n```\n~~~", ["```"]),
    "with a language within": ("```\n```py\n```", ["```py"]),
    "unclosed": ("```py\na\n\n# b", ["a\n\n# b"]),
    "just begun": ("a\n```", [""]),
    "in a list": ("1. a\n   ```py\n   b\n     c\n   ```\n2. d", ["b\n  c"]),
    "formula": ("$$\na_b\n$$\nc", ["$$\na_b\n$$"]),
    "formula in brackets": ("\\[ a_b \\]", ["\\[ a_b \\]"]),
}

LONG = (
    "a", "*", "**a ", "_a ", "`", "` ``", "[", "![", "[a](", "[a](x", "]", "\\(", "\\[", "$", "$a ", "~~", "|", "|-",
    "> ", ">", "- ", "1. ", "# ", "```", "~", "~`",
    "https://", "https://%", "https://[", "<https://", "- - ", " ", "\\",
    "a\n|-|\n", "\n- ", "\n```\n", "\n\n", "- a\n\n", "***", "*_", "\u2028", "```\u2028 ",
)  # fmt: skip
LENGTH = 200_000


def draw(page: "Page", text: str) -> str:
    return str(page.evaluate(HTML, text))


def test_markdown_becomes_these_nodes(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        wrong = {name: draw(page, text) for name, (text, html) in NODES.items() if draw(page, text) != html}
    assert wrong == {}


def test_table_has_heads_and_cells(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        html = draw(page, "| a | **b** |\n|:--|--:|\n| 1 \\| 2 | `c` |\n| 3 |\n\nend")
    assert '<th scope="col">a</th><th scope="col"><strong>b</strong></th>' in html
    assert "<td>1 | 2</td><td><code>c</code></td></tr><tr><td>3</td><td></td>" in html
    assert html.endswith("<p>end</p>")


def test_fences_hold_their_text(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        wrong = {name: page.evaluate(CODE, text) for name, (text, code) in FENCES.items()
                 if page.evaluate(CODE, text) != code}  # fmt: skip
    assert wrong == {}


def test_hostile_markdown_makes_no_element_that_acts(site: Site, opened: Opened) -> None:
    find = """text => { const place = document.createElement('div'); drawMarkdown(place, text);
        const all = [...place.querySelectorAll('*')];
        return all.filter((one) => one.matches('img, script, svg, iframe, b, style, object, form')
            || [...one.attributes].some(({ name }) => name.startsWith('on') || name === 'src' || name === 'style')
            || one.tagName === 'A' && !/^https?:$/.test(one.protocol)).map((one) => one.outerHTML); }"""
    with opened(site.root) as page:
        assert {text: page.evaluate(find, text) for text in HOSTILE} == {text: [] for text in HOSTILE}


def test_refused_link_stays_as_its_text(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        assert draw(page, "[x](javascript:a)") == "<p>[x](javascript:a)</p>"


@table("piece", LONG)
def test_long_line_is_drawn_in_one_pass(site: Site, opened: Opened, piece: str) -> None:
    """What takes the square of the length would last longer than the browser waits."""
    with opened(site.root) as page:
        page.evaluate(HTML, piece * (LENGTH // len(piece)))


def test_begun_answer_is_drawn_at_every_length(site: Site, opened: Opened) -> None:
    text = (
        "# A\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n1. **x** `y`\n   - z\n\n```py\na\n```\n\n[a](https://b.example) $c$"
    )
    pieces = """([text, html]) => { const place = document.createElement('div');
        for (let end = 0; end <= text.length; end += 1) drawMarkdown(place, text.slice(0, end));
        return place.innerHTML === html; }"""
    with opened(site.root) as page:
        assert page.evaluate(pieces, [text, draw(page, text)])


def test_finished_blocks_keep_their_nodes(site: Site, opened: Opened) -> None:
    keep = """() => { const place = document.createElement('div');
        drawMarkdown(place, 'a\\n\\nb'); const first = place.firstChild;
        drawMarkdown(place, 'a\\n\\nb c'); return [first === place.firstChild, place.textContent]; }"""
    with opened(site.root) as page:
        assert page.evaluate(keep) == [True, "ab c"]


def test_code_of_an_answer_is_copied(site: Site, opened: Opened) -> None:
    with opened(site.root, permissions=["clipboard-read", "clipboard-write"]) as page:
        answer_chats(page, "# Code\n\n```py\nprint(1)\n```")
        page.wait_for_selector('#model option:not([value=""])', state="attached")
        page.click("#ask")
        page.click(".answer .code button")
        page.wait_for_selector("#copied:text('Copied')", state="attached")
        assert page.evaluate("() => navigator.clipboard.readText()") == "print(1)"
        assert page.inner_text(".answer h3") == "Code"


@table("width", [375, 1440])
def test_wide_answer_scrolls_within_itself(site: Site, opened: Opened, width: int) -> None:
    row = "|" + "a wide cell |" * 20
    with opened(site.root, width) as page:
        answer_chats(page, f"{row}\n|{'---|' * 20}\n{row}\n\n```\n{'x' * 500}\n```\n\n`{'y' * 500}` $$ {'z' * 500} $$")
        page.wait_for_selector('#model option:not([value=""])', state="attached")
        page.click("#ask")
        page.wait_for_selector(".answer table")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
