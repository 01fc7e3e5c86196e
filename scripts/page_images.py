"""Make the images of docs/page.md: the page after an answer, and the board of two workers with some traffic."""

import base64
import concurrent.futures
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from browsing import chromium
from PIL import Image

from saccade.cli.bundled import bundled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FILES = sorted(Path(str(bundled("images"))).glob("*/*.png"))
WIDTH = 1280
MAX_BYTES = 100_000
COLOURS = 64
NUM_REQUESTS = 600
ADMIN_KEY = "admin-key"
PORT, ADMIN_PORT = 8000, 8001
"""The images show the default port, which must be free."""
PROGRAM = (sys.executable, "-m", "saccade.cli.main")


def num_ready() -> int:
    """Return how many workers the gateway has ready; 0 while it does not listen."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{ADMIN_PORT}/board", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
    )
    with contextlib.suppress(OSError):
        return sum(worker["ready"] for worker in json.load(urllib.request.urlopen(request))["workers"])
    return 0


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[tuple[str, str]]:
    """Run two workers of the bundled model and a gateway; yield the roots of its API and of its admin port."""
    workers = [folder / "a.sock", folder / "b.sock"]
    model = ("worker", str(bundled("model")), "--served-model-name", "saccade-reader", "--no-summary", "--uds")
    urls = [word for worker in workers for word in ("--worker-url", f"unix:{worker}")]
    gateway = ("gateway", *urls, "--admin-port", str(ADMIN_PORT), "--log-level", "WARNING")
    commands = [(*model, str(worker)) for worker in workers] + [gateway]
    environment = {**os.environ, "SACCADE_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen((*PROGRAM, *command), env=environment) for command in commands]
    try:
        while num_ready() < len(workers):
            time.sleep(0.2)
        yield f"http://127.0.0.1:{PORT}/", f"http://127.0.0.1:{ADMIN_PORT}/"
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


def ask(root: str, number: int) -> None:
    """Send one of several images with one of two questions; every 50th request is wrong."""
    chosen = random.Random(number)
    data = base64.b64encode(chosen.choice(FILES).read_bytes()).decode() if number % 50 else "bm8gaW1hZ2U="
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    text = {"type": "text", "text": chosen.choice(["What does it say?", "What colour is the text?"])}
    body = {"messages": [{"role": "user", "content": [image, text]}], "min_tokens": 60, "max_tokens": 80}
    request = urllib.request.Request(
        root + "v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request).read()


def save(page: "Page", name: str) -> None:
    """Write what *page* shows as docs/images/NAME.png, with few colours. Raises RuntimeError if it is still large."""
    IMAGES.mkdir(exist_ok=True)
    shown = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    shown.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        path := IMAGES / f"{name}.png", optimize=True
    )
    if path.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{path} has {path.stat().st_size} bytes, over {MAX_BYTES}.")
    print(f"{path}: {path.stat().st_size} bytes")


def show_page(browser: "Browser", root: str, name: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 600}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(root)
    page.wait_for_selector('#model option:not([value=""])', state="attached")
    page.set_input_files("#file", FILES[-1])
    page.wait_for_selector("#attachments li")
    page.click("#ask")
    page.wait_for_selector(".facts:not([hidden])")
    page.wait_for_timeout(300)
    save(page, name)
    context.close()


def show_board(browser: "Browser", root: str, admin: str) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": 600}, color_scheme="light")
    page.goto(admin)
    page.fill("#admin-key", ADMIN_KEY)
    page.press("#admin-key", "Enter")
    page.wait_for_selector("#board:not([hidden])")
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        for number in range(1, NUM_REQUESTS):
            clients.submit(ask, root, number)
        page.wait_for_timeout(24_000)
        page.click("#form button.main")
        page.wait_for_selector("#route table")
        page.evaluate("() => document.activeElement.blur()")
        save(page, "board")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, fleet(Path(folder)) as (root, admin), chromium() as browser:
        show_page(browser, root, "page", WIDTH, "light")
        show_page(browser, root, "page-dark", WIDTH, "dark")
        show_board(browser, root, admin)


if __name__ == "__main__":
    main()
