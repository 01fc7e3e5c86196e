"""Whatever is sent as an image, a video or frames: each pair of what it is and what it was sent as has its sentence."""

import base64
import struct

import clips
import images
import matroska
import pytest
from tables import table

from saccade.errors import InvalidBase64, RequestError, UnsupportedVideoFormat
from saccade.gateway.images.frames_url import read_frames
from saccade.gateway.images.media_loader import decode_data_url
from saccade.media.header import ImageLimits, read_header
from saccade.media.video_header import demuxer
from saccade.models.family import VideoOptions

IMAGES = "send JPEG, PNG, WebP, GIF, AVIF or BMP."
VIDEOS = "MP4, MOV, WebM, Matroska or GIF."
MP4 = clips.clip(num_frames=2)
WEBM = matroska.recorded("vp8", (0, 100))
PICTURES = {
    kind: images.encode(images.random_image(20, 10), kind.upper()) for kind in ("JPEG", "PNG", "WebP", "AVIF", "BMP")
}


def tga(kind: int, colours: int = 0, bits: int = 24, name: bytes = b"", footer: bool = False) -> bytes:
    """Return a TGA of 20 x 10: *kind* of image, *colours* in its map, *bits* of a pixel."""
    head = struct.pack(
        "<BBBHHBHHHHBB", len(name), colours > 0, kind, 0, colours, 24 * (colours > 0), 0, 0, 20, 10, bits, 0x20
    )
    return head + name + bytes(3 * colours) + bytes(20 * 10 * bits // 8) + footer * (bytes(8) + b"TRUEVISION-XFILE.\0")


OTHERS = {
    "TGA": (tga(2), tga(2, bits=32, footer=True), tga(10, bits=16), tga(3, bits=8), tga(11, bits=8, name=b"a name"),
            tga(1, 256, 8), tga(9, 16, 8, b"map"), tga(2, name=bytes(26))),
    "ICO": (b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + bytes(40), b"\0\0\1\0\2\0"),
    "CUR": (b"\0\0\2\0\1\0\x10\x10\0\0\3\0\4\0" + bytes(40),),
    "TIFF": (b"II*\0\x08\0\0\0",),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40), b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"),
    "JPEG XL": (b"\xff\x0a\0\0",),
    "PSD": (b"8BPS\0\1",),
    "AVI video": (b"RIFF\0\0\0\0AVI LIST",),
    "FLV video": (b"FLV\1\5",),
    "MPEG video": (b"\0\0\1\xba\x44", b"\0\0\1\xb3\x14", (b"G\x40\0\x10" + bytes(184)) * 2),
    "WMV video": (bytes.fromhex("3026b2758e66cf11a6d9"),),
    "Ogg": (b"OggS\0\2",),
    "WAV audio": (b"RIFF\0\0\0\0WAVEfmt ",),
    "MP3 audio": (b"ID3\4\0", b"\xff\xfb\x90\x64"),
    "FLAC audio": (b"fLaC\0",),
    "M4A audio": (b"\0\0\0\x18ftypM4A \0\0\0\0",),
    "ZIP": (b"PK\3\4\x14\0",),
    "gzip": (b"\x1f\x8b\x08\0",),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>",),
    "HTML": (b"<!DOCTYPE html><p>not found</p>",),
}  # fmt: skip


def frames(*contents: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(content).decode() for content in contents)


def sentence_as(sent_as: str, content: bytes) -> str | None:
    """Return the sentence that refuses *content* sent as an image, a video or frames; None if it is read."""
    try:
        match sent_as:
            case "image":
                read_header(content)
            case "video":
                demuxer(content)
            case "frames":
                read_frames(frames(content), VideoOptions(), ImageLimits())
    except RequestError as error:
        return error.message
    return None


@table("name", [name for name in OTHERS if name != "M4A audio"])
def test_other_formats_are_named_in_each_place(name: str) -> None:
    for content in OTHERS[name]:
        for sent_as in ("image", "frames"):
            assert sentence_as(sent_as, content) == f"The image looks like {name}, which is not supported; {IMAGES}"
        assert sentence_as("video", content) == f"The video looks like {name}, which is not supported; send {VIDEOS}"


@table(
    ("content", "name", "media_type"),
    [
        (MP4, "MP4 video", "video/mp4"),
        (clips.fragmented(MP4), "MP4 video", "video/mp4"),
        (b"\0\0\0\x14ftypqt  \0\0\0\0qt  ", "MOV video", "video/quicktime"),
        *((MP4.replace(b"ftyp", kind, 1), "MOV video", "video/quicktime") for kind in (b"wide", b"skip", b"free")),
        (WEBM, "WebM or Matroska video", "video/webm"),
        (clips.clip("vp9", num_frames=2), "WebM or Matroska video", "video/webm"),
    ],
)
def test_videos_are_sent_to_their_place(content: bytes, name: str, media_type: str) -> None:
    assert sentence_as("video", content) is None
    assert sentence_as("image", content) == (
        f"The image looks like {name}, which is not supported; send it as `video_url` to a model that takes videos, or "
        f"{IMAGES}"
    )
    told = (
        f"The bytes are {name}, not a frame: send it as {media_type}, in `data:{media_type};base64,`. "
        "`data:video/jpeg;base64,` takes images, with commas between them."
    )
    assert sentence_as("frames", content) == told
    for several in (frames(content, PICTURES["JPEG"]), frames(PICTURES["PNG"], content)):
        with pytest.raises(UnsupportedVideoFormat) as refused:
            read_frames(several, VideoOptions(), ImageLimits())
        assert refused.value.message == told


@table("kind", PICTURES)
def test_images_are_sent_to_their_place(kind: str) -> None:
    assert sentence_as("image", PICTURES[kind]) is None
    assert sentence_as("frames", PICTURES[kind]) is None
    several = [PICTURES[kind]] if kind in ("JPEG", "BMP") else [PICTURES[kind], images.animation(kind.upper())]
    for content in several:
        assert sentence_as("video", content) == (
            f"The video is a {kind} image: send it as `image_url`, or frames of a video as `data:video/jpeg;base64,`. "
            f"Videos are {VIDEOS}"
        )


def test_a_gif_is_read_in_each_place() -> None:
    for sent_as in ("image", "video", "frames"):
        assert sentence_as(sent_as, images.animation("GIF")) is None


def test_a_pdf_is_sent_to_its_place() -> None:
    pdf = b"%PDF-1.7\n"
    assert sentence_as("video", pdf) == f"The video is a PDF: send it as `file` or `image_url`. Videos are {VIDEOS}"
    assert "PDF" in str(sentence_as("frames", pdf))


def test_frames_under_another_type_are_told_theirs() -> None:
    payload = frames(*PICTURES.values()).partition(",")[2]
    for media_type in ("image/jpeg", "video/mp4", "video/png"):
        with pytest.raises(
            InvalidBase64, match=r"^The .* not valid base64: .*\. Frames .* `data:video/jpeg;base64,`\.$"
        ):
            decode_data_url(f"data:{media_type};base64,{payload}")
    with pytest.raises(InvalidBase64, match=r"not valid base64: it has other characters than base64\.$"):
        decode_data_url("data:image/png;base64,?")


@table("content", [b"hello", bytes(100), b"\0\0\3\0" + bytes(40), b"\0\1\2\0" + b"\xff" * 40])
def test_unknown_bytes_have_no_name(content: bytes) -> None:
    for sent_as in ("image", "frames"):
        assert sentence_as(sent_as, content) == f"The bytes are not an image in a known format; {IMAGES}"
    assert sentence_as("video", content) == f"The bytes are not a video in a known format; send {VIDEOS}"
