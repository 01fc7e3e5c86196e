"""PDFs, videos and boxes on the page: what is sent, and what the person sees of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clips
import pytest
from conftest import Opened, Site, answer_chats
from PIL import Image
from tables import table

from saccade.cli.bundled import bundled
from saccade.models import families

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

IMAGE = Path(str(bundled("images"))) / "texts" / "LS-red.png"
COLOUR = """([left, top]) => {
    const canvas = document.getElementById("canvas");
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(left * canvas.width, top * canvas.height, 1, 1);
    return [...data.slice(0, 3)];
}"""
RED, BLUE = (200, 0, 0), (0, 0, 200)
SEEN_IMAGES = [{"width": 256, "height": 128, "patch": 16, "tokens": 32}]
SEEN = {"prompt_tokens_details": {"images": SEEN_IMAGES}}

PLACED = [["cat", [0.1, 0.4, 0.3, 0.8]]]
FAMILIES: dict[str, tuple[str, str, list[Any]]] = {
    "Qwen2-VL": ("qwen2_vl", "cat(100,400),(300,800)", PLACED),
    "Qwen2.5-VL, in an image of 256x128 pixels": (
        "qwen2_5_vl", '{"bbox_2d": [25.6, 51.2, 76.8, 102.4], "label": "cat"}', PLACED,
    ),
    "Qwen3-VL": ("qwen3_vl", '```json\n[{"bbox_2d": [100, 400, 300, 800], "label": "cat"}]\n```', PLACED),
    "Qwen3.5": ("qwen3_5", '[{"bbox_2d": [100, 400, 300, 800], "label": "cat"}]', PLACED),
    "Gemma 4": ("gemma4", '[{"box_2d": [400, 100, 800, 300], "label": "cat"}]', PLACED),
    "Gemma 4 without a vision tower": ("gemma4_unified", '{"box_2d": [400, 100, 800, 300], "label": "cat"}', PLACED),
    "Gemma 4 that was asked for another form": ("gemma4", '{"bbox_2d": [100, 400, 300, 800], "label": "cat"}', PLACED),
    "InternVL": (
        "internvl", "<ref>cat</ref><box>[[100, 400, 300, 800], [0, 0, 500, 1000]]</box>",
        [*PLACED, ["cat", [0, 0, 0.5, 1]]],
    ),
    "GLM": (
        "glm4v", "They are at [[100,400,300,800],[0,0,500,1000]].",
        [["", [0.1, 0.4, 0.3, 0.8]], ["", [0, 0, 0.5, 1]]],
    ),
    "GLM's agent": ("glm4v", '{"action_type": "click", "box_2d": [[100,400,300,800]], "label": "cat"}', PLACED),
    "a family that was not trained for boxes": ("gemma3", '{"bbox_2d": [100, 400, 300, 800], "label": "cat"}', []),
}  # fmt: skip
"""An answer in the form of each family that names boxes, and where they are in parts of the image's sides."""

BOXES: dict[str, tuple[str, list[Any]]] = {
    "Qwen's JSON": (
        '```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}, {"bbox_2d": [1, 2, 3, 4.5], "label": "dog"}]\n```',
        [["cat", [10, 20, 30, 40]], ["dog", [1, 2, 3, 4.5]]],
    ),
    "InternVL's tags": ("<ref>a cat</ref><box>[[10, 20, 30, 40]]</box>", [["a cat", [10, 20, 30, 40]]]),
    "Qwen2-VL's pairs": ("the cat(10,20),(30,40)", [["the cat", [10, 20, 30, 40]]]),
    "four numbers alone": ("[[10, 20, 30, 40]]", [["", [10, 20, 30, 40]]]),
    "text": ("Between [1, 2, 3, 4] and {these} there is f(1, 2).", []),
    "sides in the wrong order": ('{"bbox_2d": [30, 20, 10, 40]}', []),
    "other JSON": ('{"bbox_2d": [1, 2, 3], "a": null} {"bbox_2d": "x"} {"bbox_2d": ["a", 1, 2, 3]} {}', []),
    "no list of boxes": ('{"bbox_2d": [[1, 2, 3], [], null]} {"bbox_2d": []} [[1, 2, 3, 4], 5] [[1, 2], [3, 4]]', []),
    "lists without an end": ("[[1, 2, 3, 4], " * 20_000, []),
    "many": ('{"bbox_2d": [1, 2, 3, 4]}' * 1000, [["", [1, 2, 3, 4]]] * 200),
    "a label that is no text": ('{"bbox_2d": [1, 2, 3, 4], "label": {"a": 1}}', []),
}


def add(page: "Page", *files: Path) -> None:
    page.wait_for_selector('#model option:not([value=""])', state="attached")
    page.set_input_files("#file", list(files))
    page.wait_for_selector(f"#attachments li:nth-child({len(files)})")


def ask(page: "Page") -> list[dict[str, Any]]:
    """Ask, and return the parts of the request's only message, once the answer has ended."""
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#ask")
    page.wait_for_selector(".facts:not([hidden])")
    [message] = json.loads(sent.value.post_data or "")["messages"]
    return list(message["content"])


def write_pdf(path: Path) -> Path:
    """A PDF of a red and a blue page."""
    first, second = (Image.new("RGB", (256, 128), colour) for colour in (RED, BLUE))
    first.save(path, save_all=True, append_images=[second])
    return path


def has_colour(page: "Page", expected: tuple[int, int, int]) -> bool:
    """Whether the canvas shows *expected* in the middle of a patch."""
    shown = page.evaluate(COLOUR, [0.47, 0.47])
    return all(abs(one - other) < 40 for one, other in zip(shown, expected, strict=True))


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (375, "dark")])
def test_pages_of_a_pdf_are_shown_as_drawn_with_their_patches(
    site: Site, opened: Opened, tmp_path: Path, width: int, scheme: Any
) -> None:
    with opened(site.root, width, color_scheme=scheme) as page:
        add(page, write_pdf(tmp_path / "two.pdf"), IMAGE)
        assert "2 pages" in page.inner_text("#attachments li:nth-child(1)")
        assert page.locator("#attachments img").count() == 2
        ask(page)
        assert page.inner_text("#which").split("\n") == ["Page 1", "Page 2", "Image 3"]
        assert page.inner_text("#caption").startswith("two.pdf, page 1:")
        assert has_colour(page, RED)
        with page.expect_response("**/pdf_pages/2"):
            page.click("#which button:nth-child(2)")
        page.wait_for_selector("#caption:has-text('two.pdf, page 2:')")
        assert has_colour(page, BLUE)
        assert "two.pdf, page 2" in (page.get_attribute("#canvas", "aria-label") or "")
        page.click("#which button:nth-child(3)")
        page.wait_for_selector("#caption:has-text('LS-red.png:')")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_page_of_a_pdf_is_drawn_once_however_often_it_is_looked_at(site: Site, opened: Opened, tmp_path: Path) -> None:
    drawn: list[str] = []
    with opened(site.root) as page:
        page.on("request", lambda request: drawn.extend(request.url.split("pdf_pages/")[1:]))
        add(page, write_pdf(tmp_path / "two.pdf"))
        answer_chats(page, "one", usage={"prompt_tokens_details": {"images": SEEN_IMAGES * 2}})
        ask(page)
        for number in (2, 1, 2, 1):
            page.click(f"#which button:has-text('Page {number}')")
            page.wait_for_selector(f"#caption:has-text('two.pdf, page {number}:')")
    assert drawn == ["1", "2"]


def test_pdf_that_the_server_refuses_is_named_at_once(site: Site, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.7 nothing more")
    with opened(site.root, may_fail=True) as page:
        page.set_input_files("#file", [tmp_path / "bad.pdf", IMAGE])
        page.wait_for_selector("#attachments li")
        assert page.inner_text("#error").startswith("bad.pdf: The PDF ")
        assert page.locator("#attachments li").count() == 1
        assert page.is_hidden("#opening")


def test_question_waits_for_a_file_that_is_being_opened(site: Site, opened: Opened, tmp_path: Path) -> None:
    waiting: list[Any] = []
    with opened(site.root) as page:
        answer_chats(page, "one")
        page.route("**/pdf_pages/1", lambda route: waiting.append(route))
        page.set_input_files("#file", write_pdf(tmp_path / "two.pdf"))
        page.wait_for_selector("#opening:has-text('Opening two.pdf')")
        page.click("#ask")
        assert page.is_hidden("#conversation")
        waiting[0].continue_()
        page.wait_for_selector("#attachments li")
        assert [part["type"] for part in ask(page)] == ["image_url", "text"]


@pytest.mark.parametrize("codec", ["vp8", "h264"])
def test_video_is_sent_as_one_and_its_first_frame_is_shown(
    site: Site, opened: Opened, tmp_path: Path, codec: str
) -> None:
    video = tmp_path / f"clip.{clips.CODECS[codec][1]}"
    video.write_bytes(clips.clip(codec, 256, 128))
    with opened(site.root) as page:
        add(page, video)
        assert "videos" in page.inner_text("#what")
        assert "video/*" in (page.get_attribute("#file", "accept") or "")
        assert page.locator("#attachments img").count() == 1
        part, _ = ask(page)
        assert part["type"] == "video_url"
        assert part["video_url"]["url"].startswith("data:video/")
        caption = page.inner_text("#caption")
        assert "frames; the video's first is drawn" in caption
        assert '"type":"video_url"' in page.inner_text("#code")


@table("name", BOXES)
def test_boxes_are_read_in_every_form(name: str, site: Site, opened: Opened) -> None:
    answer, boxes = BOXES[name]
    with opened(site.root) as page:
        found = page.evaluate("text => boxesOf(text, 'thousandths').map(({ label, sides }) => [label, sides])", answer)
    assert found == boxes


def test_boxes_of_each_family_are_placed_as_its_releases_mean_them(site: Site, opened: Opened) -> None:
    assert {name for name, family in families().items() if family.box_coordinates} <= {
        name for name, *_ in FAMILIES.values()
    }
    with opened(site.root) as page:
        for case, (name, answer, boxes) in FAMILIES.items():
            found = page.evaluate(
                """([text, coordinates]) => placedBoxes(text, coordinates, { width: 256, height: 128 })
                    .map(({ label, sides }) => [label, sides.map((side) => Math.round(side * 1000) / 1000)])""",
                [answer, families()[name].box_coordinates],
            )
            assert found == boxes, case


def test_boxes_of_the_answer_are_drawn_and_listed(site: Site, opened: Opened) -> None:
    answer = json.dumps([{"bbox_2d": [250, 250, 750, 750], "label": "<b>LS</b>"}])
    with opened(site.root) as page:
        answer_chats(page, answer, usage=SEEN)
        add(page, IMAGE)
        ask(page)
        page.wait_for_selector("#boxes:not([hidden])")
        assert page.locator("#boxes li").all_inner_texts() == ["<b>LS</b>: from 64, 32 to 192, 96"]
        red, green, _ = page.evaluate(COLOUR, [0.75, 0.5])
        assert (red > 150, green < 100) == (True, True)
        assert "boxes" in (page.get_attribute("#canvas", "aria-describedby") or "")


def test_model_without_boxes_gets_none(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        answer_chats(page, '{"bbox_2d": [250, 250, 750, 750]}', usage=SEEN)
        add(page, IMAGE)
        page.evaluate("() => cards.forEach((card) => { delete card.box_coordinates; })")
        ask(page)
        page.wait_for_selector("#caption:has-text('LS-red')")
        assert page.is_hidden("#boxes")
