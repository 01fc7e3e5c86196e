"""Answers in the markup of each kind of model, as Markdown with blocks and figures."""

from tables import table

from saccade.documents.forms import page_forms
from saccade.documents.markup import Reading, Sheet, read_answer
from saccade.documents.page_text import Block, Figure
from saccade.models.family import PageForm

SHEET = Sheet(800, 1000, "a.pdf-3")

FRONT_MATTER = """---
primary_language: en
is_rotation_valid: True
rotation_correction: 0
is_table: False
is_diagram: False
---
# Sales

![A bar [chart]](page_100_200_300_990.png)

<table><tr><td>1</td></tr></table>
"""

HTML = """<div data-bbox="[0, 0, 1000, 40]" data-label="Page-Header">Annual report</div>
<div data-bbox="[100, 50, 900, 90]" data-label="Section-Header"><h2>Sales &amp; costs</h2></div>
<div data-bbox="[100, 100, 900, 300]" data-label="Text"><p>They <b>grew</b> by
5 %, as <math>x^2</math> says; $3 each.</p><p>Second.<br>Line.</p></div>
<div data-bbox="[100, 310, 900, 400]" data-label="List-Group"><ul><li>one<ol><li>a</li><li>b</li></ol></li>
<li><input type="checkbox" checked> two</li></ul></div>
<div data-bbox="[100, 410, 900, 500]" data-label="Table"><table border="1"><tr><th colspan="2">A</th></tr>
<tr><td>1 &lt; 2</td><td>3</td></tr></table></div>
<div data-bbox="[100, 510, 900, 590]" data-label="Equation-Block"><math display="block">a &lt; b</math></div>
<div data-bbox="[250, 600, 750, 1200]" data-label="Figure"><img alt="A map"></div>
<div data-bbox="100 900 900 950" data-label="Code-Block"><pre><code>if x:
    y()</code></pre></div>"""

MARKDOWN = r"""## Sales & costs

They **grew** by 5 %, as $x^2$ says; \$3 each.

Second.<br>
Line.

- one
  1. a
  2. b
- [x] two

<table><tr><th colspan="2">A</th></tr>
<tr><td>1 &lt; 2</td><td>3</td></tr></table>

$$a < b$$

![A map](a.pdf-3-1.png)

```
if x:
    y()
```"""


@table(
    ("form", "answer", "markdown"),
    [
        ("markdown", " # A\n\ntext\n", "# A\n\ntext"),
        ("markdown", "```markdown\n# A\n```\n", "# A"),
        ("markdown", "```markdown\n# A, cut off", "# A, cut off"),
        ("markdown", "Code:\n```\nx\n```", "Code:\n```\nx\n```"),
        ("paddleocr-vl", "INVOICE\n12.50", "INVOICE\n12.50"),
        ("glm-ocr", "## INVOICE", "## INVOICE"),
        ("olmocr", "---\nprimary_language: null\n---", ""),
        ("olmocr", "---\nprimary_language: en\n---\na\n---\nb", "a\n---\nb"),
        ("chandra", "", ""),
        ("chandra", "no blocks", "no blocks"),
        ("chandra", '<div data-bbox="[0, 0, 9, 9]" data-label="Text"><p>cut o', "cut o"),
    ],
)
def test_answer_becomes_markdown(form: str, answer: str, markdown: str) -> None:
    assert read_answer(answer, page_forms()[form], SHEET).markdown == markdown


def test_figures_of_a_front_matter_answer_have_pixels_of_the_page() -> None:
    reading = read_answer(FRONT_MATTER, page_forms()["olmocr"], SHEET)
    shown = "![A bar (chart)](a.pdf-3-1.png)"
    assert reading.markdown == f"# Sales\n\n{shown}\n\n<table><tr><td>1</td></tr></table>"
    assert reading.figures == [Figure("a.pdf-3-1.png", (100, 200, 400, 1000))]
    assert reading.blocks == [Block("Figure", (100, 200, 400, 1000), shown)]


def test_blocks_of_an_html_answer_have_pixels_of_the_page() -> None:
    reading = read_answer(HTML, page_forms()["chandra-ocr-2"], SHEET)
    assert reading.markdown == MARKDOWN
    assert [block.label for block in reading.blocks] == [
        *("Page-Header", "Section-Header", "Text", "List-Group", "Table", "Equation-Block", "Figure", "Code-Block"),
    ]
    assert reading.blocks[0] == Block("Page-Header", (0, 0, 800, 40), "Annual report")
    assert reading.blocks[-1].box == (80, 900, 720, 950)
    assert reading.figures == [Figure("a.pdf-3-1.png", (200, 600, 600, 1000))]


def test_boxes_without_a_scale_are_pixels() -> None:
    answer = '<div data-bbox="[10, 20, 30, 40]" data-label="Text">a</div>'
    [block] = read_answer(answer, PageForm("", "html_blocks"), SHEET).blocks
    assert block.box == (10, 20, 30, 40)


@table("place", ["", "[1, 2]", "[5, 5, 5, 5]", "none", "[2000, 0, 3000, 9]", f"[0, {'9' * 5000}, 9, {'9' * 5000}]"])
def test_figure_without_a_place_is_not_cut_out(place: str) -> None:
    answer = f'<div data-bbox="{place}" data-label="Image"><img alt="A map"></div>'
    reading: Reading = read_answer(answer, page_forms()["chandra"], SHEET)
    assert (reading.figures, reading.markdown) == ([], "A map")


@table("place", ["10_10_0_5", "900_0_50_50", "0_0_50_0"])
def test_figure_outside_of_the_page_is_not_cut_out(place: str) -> None:
    reading = read_answer(f"a\n\n![A map](page_{place}.png)", page_forms()["olmocr"], SHEET)
    assert (reading.figures, reading.blocks, reading.markdown) == ([], [], "a\n\nA map")


@table("marks", ["<![", "<![x[", "<![CDATA[", "<![if a]>", "<!", "<?", "</", "&#x110000;", "<a <b"])
def test_marks_that_are_no_elements_do_no_harm(marks: str) -> None:
    for answer in (f"a {marks} b", f"<table><tr><td>{marks} b</td></tr></table>"):
        assert "b" in read_answer(f"{answer}\n<p>b</p>", page_forms()["chandra"], SHEET).markdown
