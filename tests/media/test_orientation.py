"""Images that say how to turn them, in any place, against Pillow's exif_transpose()."""

import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import images
import numpy as np
import oriented
import pytest
from oriented import PROFILE, XMP, exif, in_attribute, in_element, profile, text, xmp
from PIL import Image, ImageOps
from tables import table

from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header
from saccade.media.orientation import MAX_TEXT_BYTES

LIMITS = ImageLimits()
BLOCK = b"Exif\0\0"


def by_pillow(encoded: bytes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def all_formats(packet: bytes) -> dict[str, bytes]:
    """Return an image of each format that has XMP, with *packet*."""
    return {
        **({"jpeg": oriented.jpeg(oriented.JPEG_XMP + packet)} if len(packet) < 65_000 else {}),
        "webp": oriented.webp([(b"XMP ", packet)]),
        "avif": oriented.avif(packet=packet),
        **{f"png {kind}": oriented.png([text(kind, XMP, packet)]) for kind in ("tEXt", "zTXt", "iTXt", "packed")},
        "png after the pixels": oriented.png(after=[text("iTXt", XMP, packet)]),
    }


@table("value", [*range(10), 12, "x", "", " 6"], ids=map(str, [*range(10), 12, "x", "nothing", "space"]))
@table("form", [in_attribute, in_element], ids=["attribute", "element"])
def test_xmp_turns_every_format_as_pillow_does(form: Callable[[object], bytes], value: object) -> None:
    for name, encoded in all_formats(form(value)).items():
        assert np.array_equal(decode(encoded, LIMITS), by_pillow(encoded)), name


@table(
    "packet",
    [
        xmp("tiff:Orientation='6'>"),
        xmp('tiff:Orientation = "6">'),
        xmp('t:Orientation="6">'),
        xmp('exif:Orientation="6">'),
        xmp("><t:Orientation>6</t:Orientation>"),
        xmp("><tiff:Orientation> 6 </tiff:Orientation>"),
        xmp("><tiff:Orientation rdf:type='x'>6</tiff:Orientation>"),
        xmp('tiff:Orientation="3"><tiff:Orientation>6</tiff:Orientation>'),
        xmp('tiff:Orientation="9" tiff:Orientation="6">'),
        xmp('tiff:orientation="6">'),
        b'<?xpacket begin="\xef\xbb\xbf"?>' + in_attribute(6) + b" " * 2000 + b'<?xpacket end="w"?>',
        b'tiff:Orientation="6',
        b'tiff:Orientation="',
        b"\xff\xfe\xfd" + in_attribute(6),
        in_attribute(6).decode().encode("utf-16"),
        in_attribute(6).decode().encode("utf-16-be"),
        in_attribute(6).decode().encode("utf-32"),
        b"",
    ],
)
def test_spellings_of_xmp_mean_what_they_mean_to_pillow(packet: bytes) -> None:
    for name, encoded in all_formats(packet).items():
        assert np.array_equal(decode(encoded, LIMITS), by_pillow(encoded)), name


def both(block: bytes, packet: bytes) -> dict[str, bytes]:
    """Return images that have an Exif block and XMP, in either order if there is one."""
    in_jpeg = (BLOCK + block, oriented.JPEG_XMP + packet)
    in_png = ((b"eXIf", block), text("iTXt", XMP, packet))
    in_webp = ((b"EXIF", block), (b"XMP ", packet))
    return {
        "jpeg": oriented.jpeg(*in_jpeg),
        "jpeg, XMP first": oriented.jpeg(*in_jpeg[::-1]),
        "png": oriented.png(in_png),
        "png, XMP first": oriented.png(in_png[::-1]),
        "png, Exif after the pixels": oriented.png(in_png[1:], in_png[:1]),
        "webp": oriented.webp(in_webp),
        "webp, XMP first": oriented.webp(in_webp[::-1]),
        "png profile": oriented.png([text("zTXt", PROFILE + "exif", profile("exif", block)), in_png[1]]),
    }


@table(
    "block",
    [
        *(exif(value, order) for value in range(10) for order in "<>"),
        *(exif(value, kind=kind) for kind in (1, 2, 4, 6, 7, 8, 9, 13) for value in (3, 8)),
        *(exif(7, order, kind, number) for order in "<>" for kind in (3, 4) for number in (0, 2, 3)),
        *(exif(7, order, kind, number)[:-1] for order in "<>" for kind in (3, 4) for number in (2, 3)),
        exif(6)[:-5],
        exif(6, tag=oriented.UNIT),
        b"MM*\0" + exif(6, ">")[4:],
        b"II\0*" + exif(6)[4:],
        b"",
    ],
)
def test_exif_wins_over_xmp_if_it_has_the_tag(block: bytes) -> None:
    for name, encoded in both(block, in_attribute(3)).items():
        assert np.array_equal(decode(encoded, LIMITS), by_pillow(encoded)), name


@table("packet", [b"", in_attribute(3), in_element(6), in_attribute(9)], ids=["none", "3", "6", "9"])
@table("exif_value", [None, 1, 6, 9])
@table("turned", range(1, 9))
def test_boxes_of_an_avif_win_over_exif_and_xmp(turned: int, exif_value: int | None, packet: bytes) -> None:
    encoded = oriented.avif(turned, exif_value, packet)
    assert np.array_equal(decode(encoded, LIMITS), by_pillow(encoded))
    assert turned == 1 or read_header(encoded).orientation == turned


@table("value", [1, 5, 6, 8, 9])
@table("kind", ["tEXt", "zTXt", "iTXt", "packed"])
@table("name", ["exif", "APP1", "xmp", "iptc", "EXIF"])
def test_raw_profiles_turn_a_png_as_pillow_does(name: str, kind: str, value: int) -> None:
    block = exif(value, ">")
    for content in (BLOCK + block, block, BLOCK + BLOCK + block, in_attribute(value)):
        chunk = text(kind, PROFILE + name, profile(name, content))
        for encoded in (oriented.png([chunk]), oriented.png(after=[chunk]), oriented.png([chunk, (b"eXIf", exif(3))])):
            try:
                expected = by_pillow(encoded)
            except SyntaxError:  # what the profile has is no Exif
                expected = by_pillow(oriented.plain("PNG"))
            assert np.array_equal(decode(encoded, LIMITS), expected)


@table(
    "encoded",
    [
        oriented.jpeg(oriented.JPEG_XMP + in_attribute(3), oriented.JPEG_XMP + in_attribute(6)),
        oriented.jpeg(oriented.JPEG_XMP + xmp(">"), oriented.EXTENDED_XMP + in_attribute(6)),
        oriented.jpeg(oriented.EXTENDED_XMP + in_attribute(6)),
        oriented.jpeg(oriented.JPEG_XMP + in_attribute(6), oriented.EXTENDED_XMP + in_attribute(3)),
        oriented.jpeg(b"http://ns.adobe.com/xap/1.0/" + in_attribute(6)),
        oriented.jpeg(BLOCK + exif(6)[:20], BLOCK + exif(6)[20:]),
        oriented.png([text("iTXt", XMP, in_attribute(3)), text("tEXt", XMP, in_attribute(6))]),
        oriented.png([text("zTXt", XMP, in_attribute(3))], [text("iTXt", XMP, in_attribute(6))]),
        oriented.png([(b"eXIf", exif(3))], [(b"eXIf", exif(6))]),
        oriented.png([(b"eXIf", b""), text("zTXt", PROFILE + "exif", profile("exif", exif(6)))]),
        oriented.png([text("tEXt", XMP.lower(), in_attribute(6))]),
        oriented.png([text("tEXt", "xmpmeta", in_attribute(6))]),
        oriented.png([(b"zTXt", XMP.encode() + b"\0\0damaged")]),
        oriented.png([(b"iTXt", XMP.encode() + b"\0\1\1\0\0" + in_attribute(6))]),
        oriented.png([(b"iTXt", XMP.encode() + b"\0\0")]),
        oriented.png([(b"iTXt", XMP.encode() + b"\0\0\0" + in_attribute(6))]),
        oriented.png([(b"tEXt", XMP.encode())]),
        oriented.webp([(b"XMP ", in_attribute(6))], flags=0),
        oriented.webp([(b"EXIF", exif(6)), (b"XMP ", in_attribute(3))], flags=4),
        oriented.webp([(b"XMP ", in_attribute(3)), (b"XMP ", in_attribute(6))]),
        oriented.plain("GIF")[:-1] + b"!\xff\x0bXMP DataXMP" + in_attribute(6) + b"\0" + b";",
        images.encode(Image.new("RGB", (4, 6)), "AVIF", xmp=in_attribute(6), append_images=[Image.new("RGB", (4, 6), 9)],
                      save_all=True),
    ],
)  # fmt: skip
def test_places_that_repeat_or_are_damaged_mean_what_they_mean_to_pillow(encoded: bytes) -> None:
    assert np.array_equal(decode(encoded, LIMITS), by_pillow(encoded))


def test_text_is_searched_and_inflated_up_to_a_bound() -> None:
    near, far = b" " * (MAX_TEXT_BYTES - 1000), b" " * MAX_TEXT_BYTES
    for room, orientation in ((near, 6), (far, 1)):
        for name, encoded in all_formats(room + in_attribute(6)).items():
            assert read_header(encoded).orientation == orientation, name
    bomb = text("zTXt", PROFILE + "exif", profile("exif", exif(6) + bytes(8 << 20)))
    assert read_header(oriented.png([bomb])).orientation == 6
    many = [text("zTXt", XMP, bytes(1 << 20) + in_attribute(3)) for _ in range(50)]
    assert read_header(oriented.png([*many, text("zTXt", XMP, in_attribute(6))])).orientation == 6


def _described(generator: np.random.Generator) -> bytes:
    """Return an image that says how to turn it in up to three places, some damaged; drawn by *generator*."""

    def one_of(things: Sequence[Any]) -> Any:
        return things[generator.integers(len(things))]

    def block() -> bytes:
        made = exif(int(generator.integers(10)), one_of("<>"), one_of((3, 3, 3, 4, 8, 9)), int(one_of((1, 1, 1, 2, 5))))
        made = one_of((b"", b"", BLOCK)) + made
        return made[: generator.integers(14, len(made))] if generator.integers(6) == 0 else made  # its start is sound

    def packet() -> bytes:
        made = bytearray(one_of((in_attribute, in_element))(generator.integers(10)))
        if generator.integers(4) == 0:
            made[generator.integers(len(made))] = generator.integers(128)
        return bytes(made)

    def png_chunk() -> tuple[bytes, bytes]:
        kind = one_of(("tEXt", "zTXt", "iTXt", "packed"))
        name, content = one_of(((XMP, packet()), (PROFILE + "exif", profile("exif", block())), ("Comment", packet())))
        return one_of(((b"eXIf", block()), text(kind, name, content), text(kind, name, content)))

    number = generator.integers(4)
    match one_of(("jpeg", "png", "webp", "avif")):
        case "jpeg":
            return oriented.jpeg(
                *(one_of((BLOCK + block(), oriented.JPEG_XMP + packet(), oriented.EXTENDED_XMP + packet()))
                  for _ in range(number))
            )  # fmt: skip
        case "png":
            chunks = [png_chunk() for _ in range(number)]
            cut = generator.integers(number + 1)
            return oriented.png(chunks[:cut], chunks[cut:])
        case "webp":
            chunks = [one_of(((b"EXIF", block()), (b"XMP ", packet()))) for _ in range(number)]
            return oriented.webp(chunks, one_of((0, 4, 8, 12, 12, 12)))
        case _:
            value = one_of((None, None, 1, 3, 6, 9))
            return oriented.avif(one_of((1, 1, 6, 7)), value, one_of((b"", in_attribute(8), in_element(2))))


def _compare(seed: int, number: int) -> int:
    """Compare *number* images with Pillow; return how many it reads. Damaged Exif counts as missing."""
    generator, num_read = np.random.default_rng(seed), 0
    for _ in range(number):
        encoded = _described(generator)
        try:
            expected = by_pillow(encoded)
        except Exception:  # Pillow raises many kinds for damaged Exif
            assert decode(encoded, LIMITS).size == 3 * math.prod(oriented.SIZE)
            continue
        assert np.array_equal(decode(encoded, LIMITS), expected), encoded
        num_read += 1
    return num_read


def test_what_pillow_reads_of_random_orientations_is_turned_equally() -> None:
    assert _compare(1, 300) > 200


@pytest.mark.conformance
@table("seed", range(2, 12))
def test_what_pillow_reads_of_many_random_orientations_is_turned_equally(seed: int) -> None:
    _compare(seed, 500)
