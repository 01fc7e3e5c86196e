"""PDFs of every kind that is served, and hostile ones; all written here."""

from collections.abc import Sequence

TEXT = b"BT /F 24 Tf 10 40 Td (Hello 42) Tj ET"
SQUARE = b"1 0 0 rg 20 20 60 60 re f"
FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"


def written(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Return a PDF of *objects*, of which the first is the catalog."""
    content, places = b"%PDF-1.7\n", []
    for number, value in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, value)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    end = b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, trailer, len(content))
    return content + head + table + end


def stream(content: bytes, entries: bytes = b"") -> bytes:
    return b"<</Length %d%s>>stream\n%s\nendstream" % (len(content), entries, content)


def pdf(
    *pages: bytes, box: bytes = b"0 0 200 100", page: bytes = b"", catalog: bytes = b"", trailer: bytes = b""
) -> bytes:
    """Return a PDF with a page for each of *pages*, its content; the other arguments are entries of dictionaries."""
    kids = b" ".join(b"%d 0 R" % (4 + 2 * index) for index in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R%s>>" % catalog,
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages)),
        FONT,
    ]
    for index, content in enumerate(pages):
        entries = b"/MediaBox[%s]/Resources<</Font<</F 3 0 R>>>>/Contents %d 0 R%s" % (box, 5 + 2 * index, page)
        objects += [b"<</Type/Page/Parent 2 0 R%s>>" % entries, stream(content)]
    return written(objects, trailer)


def laughs(depth: int = 9) -> bytes:
    """Return a PDF whose page draws a form that draws another ten times, and so on."""
    forms = []
    for level in range(depth):
        inner = b"/Resources<</XObject<</X %d 0 R>>>>" % (5 + level + 1)
        content = b"/X Do " * 10 if level < depth - 1 else b"0 0 200 100 re f " * 100
        forms.append(stream(content, b"/Type/XObject/Subtype/Form/BBox[0 0 200 100]" + inner))
    first = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Resources<</XObject<</X 5 0 R>>>>/Contents 4 0 R>>"
    tree = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>", first, stream(b"/X Do")]
    return written([*tree, *forms])


def large_image(side: int = 60_000) -> bytes:
    """Return a PDF with a small page that shows an image of *side* x *side* pixels without data."""
    image = b"/Type/XObject/Subtype/Image/Width %d/Height %d/ColorSpace/DeviceRGB/BitsPerComponent 8" % (side, side)
    first = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Resources<</XObject<</X 5 0 R>>>>/Contents 4 0 R>>"
    tree = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>", first]
    return written([*tree, stream(b"200 0 0 100 0 0 cm /X Do"), stream(b"", image)])


SCRIPT = b"/OpenAction<</S/JavaScript/JS(while\\(1\\)app.alert\\(1\\);)>>"
EMBEDDED = b"/Names<</EmbeddedFiles<</Names[(a.exe)<</Type/Filespec/F(/etc/passwd)/EF<</F 3 0 R>>>>]>>>>"
LOCK = b"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<%s>/U<%s>>>/ID[<00><00>]" % (b"ab" * 32, b"cd" * 32)

BROKEN = {
    "nothing but a signature": (b"%PDF", "The PDF is damaged or truncated"),
    "truncated": (pdf(TEXT)[:200], "The PDF is damaged or truncated"),
    "zeros": (b"%PDF-1.7" + bytes(5000), "The PDF is damaged or truncated"),
    "no pages": (pdf(), "The PDF has no pages"),
    "a million pages": (
        written([b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[]/Count 1000000>>"]),
        "The PDF has 1000000 pages; at most 20 are served",
    ),
    "21 pages": (pdf(*[TEXT] * 21), "The PDF has 21 pages; at most 20 are served"),
    "a tree that contains itself": (
        written([b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2>>"]),
        "Page 1 of the PDF is damaged",
    ),
    "a huge page": (pdf(TEXT, box=b"0 0 14000 14000"), "Page 1 of the PDF is too large at 144 dots per inch"),
    "a long page": (pdf(TEXT, box=b"0 0 20000 10"), "Page 1 of the PDF is too large at 144 dots per inch"),
    "encrypted": (pdf(TEXT, trailer=LOCK), "The PDF is encrypted"),
    "encrypted in another way": (pdf(TEXT, trailer=b"/Encrypt<</Filter/Other/V 9>>"), "The PDF is encrypted"),
}
"""PDFs that are refused, and how the error begins."""

HARMLESS = {
    "a script": pdf(TEXT, catalog=SCRIPT),
    "an embedded file": pdf(TEXT, catalog=EMBEDDED),
    "a link": pdf(TEXT, page=b"/Annots[<</Type/Annot/Subtype/Link/Rect[0 0 9 9]/A<</S/URI/URI(http://127.0.0.1/)>>>>]"),
}
"""PDFs that look like `pdf(TEXT)`, whatever else is in them."""

BEFORE = {
    "nothing": b"",
    "a byte order mark": b"\xef\xbb\xbf",
    "line ends": b"\r\n\n\r",
    "the head of a form's part": b"--x\r\nContent-Disposition: form-data; name=file\r\nContent-Type: application/pdf\r\n\r\n",
    "a printer's commands": b"\x1b%-12345X@PJL ENTER LANGUAGE=PDF\r\n",
    "a MacBinary head": b"\0\x05a.pdf" + bytes(121),
    "as many bytes as may be": bytes(1019),
}
"""What stands before the header of files that are PDFs all the same."""
