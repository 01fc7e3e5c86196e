"""Says how releases trained from Qwen's models read document pages.

The prompts are those of the releases, word for word: with other words, the answers have another form. Sources: chandra,
prompts.py and output.py; olmOCR 2, prompts.py (both Apache 2.0).
"""

from saccade.models.family import PageForm

CHANDRA_LABELS = (
    "Caption", "Footnote", "Equation-Block", "List-Group", "Page-Header", "Page-Footer", "Image", "Section-Header",
    "Table", "Text", "Complex-Block", "Code-Block", "Form", "Table-Of-Contents", "Figure",
)  # fmt: skip
CHANDRA_TAGS = [
    "math", "br", "i", "b", "u", "del", "sup", "sub", "table", "tr", "td", "p", "th", "div", "pre", "h1", "h2", "h3",
    "h4", "h5", "ul", "ol", "li", "input", "a", "span", "img", "hr", "tbody", "small", "caption", "strong", "thead",
    "big", "code",
]  # fmt: skip
CHANDRA_ATTRIBUTES = [
    "class", "colspan", "rowspan", "display", "checked", "type", "border", "value", "style", "href", "alt", "align",
]  # fmt: skip
CHANDRA_GUIDELINES = (
    "Inline math: Surround math with <math>...</math> tags. Math expressions should be rendered in KaTeX-compatible "
    "LaTeX. Use display for block math.",
    "Tables: Use colspan and rowspan attributes to match table structure.",
    "Formatting: Maintain consistent formatting with the image, including spacing, indentation, "
    "subscripts/superscripts, and special characters.",
    "Images: Include a description of any images in the alt attribute of an <img> tag. Do not fill out the src "
    "property.",
    "Forms: Mark checkboxes and radio buttons properly.",
    "Text: join lines together properly into paragraphs using <p>...</p> tags.  Use <br> tags for line breaks within "
    "paragraphs, but only when absolutely necessary to maintain meaning.",
    "Use the simplest possible HTML structure that accurately represents the content of the block.",
    "Make sure the text is accurate and easy for a human to read and interpret.  Reading order should be correct and "
    "natural.",
)
CHANDRA_PROMPT = "\n".join(
    (
        "OCR this image to HTML, arranged as layout blocks.  Each layout block should be a div with the data-bbox "
        "attribute representing the bounding box of the block in [x0, y0, x1, y1] format.  Bboxes are normalized "
        "0-{box_scale}. The data-label attribute is the label for the block.\n",
        "Use the following labels:",
        *(f"- {label}" for label in CHANDRA_LABELS),
        f"\nOnly use these tags {CHANDRA_TAGS}, and these attributes {CHANDRA_ATTRIBUTES}.\n",
        "Guidelines:",
        *(f"* {guideline}" for guideline in CHANDRA_GUIDELINES),
    )
)
OLMOCR_PROMPT = (
    "Attached is one page of a document that you must process. Just return the plain text representation of this "
    "document as if you were reading it naturally. Convert equations to LateX and tables to HTML.\n"
    "If there are any figures or charts, label them with the following markdown syntax ![Alt text describing the "
    "contents of the figure](page_startx_starty_width_height.png)\n"
    "Return your output as markdown, with a front matter section on top specifying values for the primary_language, "
    "is_rotation_valid, rotation_correction, is_table, and is_diagram parameters."
)

CHANDRA = PageForm(CHANDRA_PROMPT.format(box_scale=1024), "html_blocks", box_scale=1024)
CHANDRA_2 = PageForm(CHANDRA_PROMPT.format(box_scale=1000), "html_blocks", box_scale=1000)
OLMOCR = PageForm(OLMOCR_PROMPT, "front_matter", longest_side=1288)
