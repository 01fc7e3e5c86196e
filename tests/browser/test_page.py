"""The page at /, in a real browser with the bundled model: what a person sees, and what a hostile file cannot do."""

import base64
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Opened, Site

from saccade.cli.bundled import bundled
from saccade.models.bundled_model import ABILITIES

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

IMAGE = Path(str(bundled("images"))) / "texts" / "LS-red.png"
HOSTILE = "<img src=x onerror=hacked()>'$(touch hacked).png"
MAX_PAGE_BYTES = 75_000
ANSWER = ".turn:last-child .answer"
FACTS = ".turn:last-child .facts:not([hidden])"
FINISHED = f"{FACTS}, #error:not([hidden])"
DROP = """([target, name, type, data]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, { type }));
    target.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
}"""


def drop(page: "Page", content: bytes, name: str = IMAGE.name) -> None:
    data = base64.b64encode(content).decode()
    page.evaluate(DROP, [page.query_selector("#drop"), name, "image/png", data])
    page.wait_for_selector("#attachments li")


def ask(page: "Page", finished: str = FINISHED) -> str:
    page.wait_for_selector('#model option:not([value=""])', state="attached")
    page.click("#ask")
    page.wait_for_selector(finished)
    page.wait_for_selector("#stop:disabled")
    return "".join(page.locator(ANSWER).all_inner_texts())  # of a refused question, none


def has_sideways_scroll(page: "Page") -> bool:
    return bool(page.evaluate("() => document.documentElement.scrollWidth > innerWidth"))


def test_page_is_small_and_loads_nothing_else(site: Site, opened: Opened, record_property: Any) -> None:
    with opened(site.root) as page:
        page.wait_for_selector('#model option:not([value=""])', state="attached")
        addresses = page.evaluate("() => performance.getEntriesByType('resource').map((one) => one.name)")
        size = page.evaluate("() => performance.getEntriesByType('navigation')[0].transferSize")
        paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        record_property("first_paint_ms", paint)
        print(f"first paint after {paint:.0f} ms, {size} bytes")
    assert [address for address in addresses if not address.startswith("data:")] == [site.root + "v1/models"]
    assert size < MAX_PAGE_BYTES


def test_rate_is_shown_if_tokens_did_not_arrive_together(site: Site, opened: Opened) -> None:
    answer = "{start: 0, first: 10, last: LAST, usage: {prompt_tokens: 3, completion_tokens: 11}}"
    with opened(site.root) as page:
        for last, shown in ((1010, True), (12, False)):
            facts = page.evaluate(f"() => factsOf({answer.replace('LAST', str(last))})")
            assert (["speed", "10 tokens/s"] in facts) is shown


def test_facts_of_an_answer_name_its_times_and_what_was_cached(site: Site, opened: Opened) -> None:
    counts = {
        "prompt_tokens": 3000,
        "completion_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2000, "image_tokens": 16, "video_tokens": 1600},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    turn = {"start": 0, "first": 250, "last": 1250, "usage": counts, "reason": "stop"}
    with opened(site.root) as page:
        assert page.evaluate("turn => factsOf(turn)", turn) == [
            ["first token after", "250 ms"],
            ["all after", "1.3 s"],
            ["speed", "10 tokens/s"],
            ["answer", "11 tokens", "4 of reasoning"],
            ["prompt", "3,000 tokens", "2,000 cached (66 %), 16 of images, 1,600 of videos"],
        ]
        del counts["prompt_tokens_details"]
        assert page.evaluate("turn => factsOf(turn)", turn)[-1] == ["prompt", "3,000 tokens", ""]


def test_dropped_image_is_answered_and_shown_as_inspect_shows_it(site: Site, opened: Opened, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "saccade.cli.main", "inspect", str(IMAGE), "--out", str(tmp_path)]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    width, height = re.search(r"resized (\d+)x(\d+)", shown).groups()  # type: ignore[union-attr]
    _, rows, columns = re.search(r"grid (\d+) x (\d+) x (\d+)", shown).groups()  # type: ignore[union-attr]
    (tokens,) = re.search(r"tokens (\d+)", shown).groups()  # type: ignore[union-attr]
    with opened(site.root) as page:
        drop(page, IMAGE.read_bytes())
        assert ask(page) == "LS"
        assert ABILITIES in page.inner_text("#note")
        caption = page.inner_text("#caption")
        assert f"{width} × {height} pixels: {columns} × {rows} patches" in caption
        assert f"{tokens} tokens" in caption
        facts = page.inner_text(FACTS)
        assert "ms" in facts
        aspect = page.evaluate("() => { const c = document.getElementById('canvas'); return [c.width, c.height]; }")
        assert aspect[0] * int(height) == aspect[1] * int(width)
        is_painted = (
            "() => new Set(document.getElementById('canvas').getContext('2d').getImageData(0, 0, 400, 200).data).size"
        )
        assert page.evaluate(is_painted) > 10
        page.click("#again")
        page.wait_for_selector("#caption:text('All were cached')")


def test_commands_of_the_page_give_the_same_answer(site: Site, opened: Opened, tmp_path: Path) -> None:
    with opened(site.root) as page:
        drop(page, IMAGE.read_bytes(), HOSTILE.replace("/", ":"))
        ask(page)
        assert page.query_selector(".attachments img[src='x']") is None
        name = page.inner_text(".turn .attachments .name")
        (tmp_path / name).write_bytes(IMAGE.read_bytes())
        curl = page.text_content("#code") or ""
        with page.expect_download() as saved:
            page.click(".turn .attachments a.name")
        assert Path(saved.value.path()).read_bytes() == IMAGE.read_bytes()
        page.click("#python")
        python = page.text_content("#code") or ""
        page.click("#copy")
        page.wait_for_selector("#copied:text('Copied')", state="attached")
    answer = subprocess.run(["bash", "-c", curl], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert json.loads(answer)["choices"][0]["message"]["content"] == "LS"
    program = [sys.executable, "-c", python]
    assert subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "LS"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_stop_ends_the_answer_at_the_server(site: Site, opened: Opened) -> None:
    def lengthen(route: Any) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), "min_tokens": 1900}))

    with opened(site.root) as page:
        page.route("**/v1/chat/completions", lengthen)
        page.wait_for_selector('#model option:not([value=""])', state="attached")
        page.click("#example")
        page.wait_for_selector("#attachments li")
        page.click("#ask")
        page.wait_for_selector(f"{ANSWER}:not(:empty)")
        page.click("#stop")
        page.wait_for_selector(f"{FACTS}:has-text('the Stop button')")
        assert page.is_enabled("#ask")
    load = 1
    while load:  # The server notices the closed connection a moment later.
        load = json.load(urllib.request.urlopen(site.root + "load"))["server_load"]


def test_error_of_the_server_is_shown_as_its_sentence(site: Site, opened: Opened) -> None:
    with opened(site.root, may_fail=True) as page:
        drop(page, b"no image", "photo.png")
        ask(page, "#error:not([hidden])")
        assert "The bytes are not an image in a known format" in page.inner_text("#error")
        page.click("#attachments button")
        page.click("#example")
        page.wait_for_selector("#attachments img")
        assert ask(page, FACTS)
        assert not page.is_visible("#error")


def test_error_within_a_stream_is_shown_after_its_text(site: Site, opened: Opened) -> None:
    begin = {"choices": [{"delta": {"content": "It says"}, "finish_reason": None}]}
    end = {"error": {"message": "The worker has gone."}}
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in (begin, end))
    with opened(site.root) as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
        assert ask(page, "#error:not([hidden])") == "It says"
        assert page.inner_text("#error") == "The worker has gone."


def test_text_of_a_model_or_a_file_never_becomes_html(site: Site, opened: Opened) -> None:
    text = "<img src=x onerror='document.title=1'><script>document.title=1</script>"
    chunk = {"choices": [{"delta": {"content": text, "reasoning_content": text}, "finish_reason": "stop"}]}
    stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    with opened(site.root) as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
        assert ask(page) == text
        assert page.text_content(".reasoning") == text
        assert page.is_hidden(".reasoning")
        page.click(".thoughts summary")
        assert page.is_visible(".reasoning")
        assert page.title() == "Saccade"
    with opened(site.root, may_fail=True) as page:  # The policy refuses what would have slipped through.
        page.evaluate(
            "() => { document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'})) }"
        )
        page.evaluate("() => { document.body.innerHTML = `<img src=x onerror='document.title=1'>` }")
        page.wait_for_timeout(100)
        assert page.title() == "Saccade"


def test_several_images_are_asked_about_in_their_order(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        page.set_input_files("#file", [IMAGE, IMAGE.with_name("8K-brown.png")])
        page.wait_for_selector("#attachments li:nth-child(2)")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page)
        *images, _ = json.loads(sent.value.post_data or "")["messages"][0]["content"]
        urls = [image["image_url"]["url"] for image in images]
        files = [IMAGE.read_bytes(), IMAGE.with_name("8K-brown.png").read_bytes()]
        assert urls == ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
        assert page.inner_text("#which").split("\n") == ["Image 1", "Image 2"]
        page.click("#which button:nth-child(2)")
        assert "8K-brown" in (page.get_attribute("#canvas", "aria-label") or "")


def test_url_goes_to_the_server_and_not_through_the_browser(site: Site, opened: Opened) -> None:
    with opened(site.root, may_fail=True) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.fill("#url", "http://images.invalid/cat.png")
        page.press("#url", "Enter")
        assert "http://images.invalid/cat.png" in page.inner_text("#attachments")
        ask(page, "#error:not([hidden])")
        assert all(request.startswith(site.root) for request in requests)
        page.fill("#url", "javascript:alert(1)")
        page.click("#add")
        assert "http://" in page.inner_text("#error")


def test_a_typed_url_is_asked_about_without_being_added_first(site: Site, opened: Opened) -> None:
    with opened(site.root, may_fail=True) as page:
        page.fill("#url", "What is it?")
        page.fill("#question", "What does it say?")
        page.click("#ask")
        assert "http://" in page.inner_text("#error")
        assert page.input_value("#question") == "What does it say?"

        page.fill("#url", "http://images.invalid/cat.png")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.click("#ask")
        image, _ = json.loads(sent.value.post_data or "")["messages"][0]["content"]
        assert image["image_url"]["url"] == "http://images.invalid/cat.png"


def test_pasted_image_is_added(site: Site, opened: Opened) -> None:
    paste = DROP.replace(
        'new DragEvent("drop", { dataTransfer: transfer,', 'new ClipboardEvent("paste", { clipboardData: transfer,'
    )
    with opened(site.root) as page:
        data = base64.b64encode(IMAGE.read_bytes()).decode()
        page.evaluate(paste, [page.query_selector("#question"), "image.png", "image/png", data])
        page.wait_for_selector("#attachments li")
        assert ask(page) == "LS"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_light_or_dark_as_the_system_and_by_its_switch(site: Site, opened: Opened, scheme: Any) -> None:
    def brightness(page: "Page") -> float:
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3])

    with opened(site.root, color_scheme=scheme) as page:
        first = brightness(page)
        assert (first > 384) == (scheme == "light")
        page.click("#theme")
        assert (brightness(page) > 384) == (scheme == "dark")
        page.reload()
        assert (brightness(page) > 384) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, 375, 768, 1440])
def test_page_never_scrolls_sideways(site: Site, opened: Opened, width: int) -> None:
    with opened(site.root, width, has_touch=width < 400, is_mobile=width < 400) as page:
        assert not has_sideways_scroll(page)
        drop(page, IMAGE.read_bytes(), "a-name-without-any-space-" * 8 + ".png")
        ask(page)
        assert not has_sideways_scroll(page)
        assert page.is_visible(".camera") == (width < 400)
    with opened(site.root + "docs", width) as page:
        page.wait_for_selector("#operations details")
        assert not has_sideways_scroll(page)


def test_keyboard_is_enough(site: Site, opened: Opened) -> None:
    with opened(site.root) as page:
        page.wait_for_selector('#model option:not([value=""])', state="attached")
        reached = []
        for _ in range(10):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("() => document.activeElement.id"))
            if reached[-1] == "example":
                page.keyboard.press("Enter")
                page.wait_for_selector("#attachments li")
            if reached[-1] == "question":
                break
        assert reached == ["model", "link", "theme", "file", "example", "url", "add", "", "", "question"]
        page.keyboard.press("Enter")
        page.wait_for_selector(FACTS)
        assert page.inner_text(ANSWER)
        page.click("#example")
        page.focus("#attachments button")
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "file"


def test_every_control_has_a_name(site: Site, keyed_site: Site, opened: Opened) -> None:
    nameless = """() => [...document.querySelectorAll("button, input, select, textarea, summary, canvas, a")].filter((one) =>
        !(one.textContent.trim() || one.ariaLabel || one.labels?.length || one.getAttribute("aria-labelledby")))
        .map((one) => one.outerHTML)"""
    for url in (site.root, keyed_site.admin):
        with opened(url) as page:
            page.wait_for_load_state("networkidle")
            assert [one for one in page.evaluate(nameless) if 'id="canvas"' not in one] == []
    with opened(site.root) as page:
        ask(page)
        assert page.get_attribute(ANSWER, "aria-live") == "polite"
        assert page.get_attribute(ANSWER, "aria-busy") == "false"
        assert page.get_attribute("#error", "role") == "alert"


def test_key_is_asked_for_and_stays_in_the_tab(keyed_site: Site, opened: Opened) -> None:
    with opened(keyed_site.root, may_fail=True) as page:
        page.wait_for_selector("#error:not([hidden])")
        assert page.inner_text("#error") == "This server has API keys. Enter one below."
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        page.wait_for_selector("#error:has-text('This API key is not known here')")
        page.fill("#key", keyed_site.api_key)
        page.press("#key", "Tab")
        page.wait_for_selector('#model option[value="saccade-reader"]', state="attached")
        assert not page.is_visible("#error")
        page.click("#example")
        assert ask(page)
        assert page.evaluate("() => [sessionStorage.key, document.cookie].includes('api-key')") is False
        assert keyed_site.api_key not in page.evaluate("() => JSON.stringify({...localStorage}) + document.cookie")
        code = page.inner_text("#code")
        assert "$SACCADE_API_KEY" in code
        assert keyed_site.api_key not in code


def test_docs_list_the_routes_with_their_fields(site: Site, opened: Opened) -> None:
    with opened(site.root + "docs") as page:
        page.click("#operations summary:has-text('POST /v1/chat/completions')")
        fields = page.inner_text("#operations details[open] table")
        assert "messages" in fields
        assert "max_tokens" in fields
        page.click("#link")
        page.wait_for_selector("#form", state="visible")
