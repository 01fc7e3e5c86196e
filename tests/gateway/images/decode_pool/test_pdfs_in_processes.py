"""PDFs in decode processes: pages and patches, confined and within limits."""

from collections.abc import AsyncIterator

import decode_servers
import numpy as np
import pdf_forms
import pdf_texts
import pdfs
import pytest
import pytest_asyncio
from drawn_pdfs import drawn
from tables import table

from saccade.errors import DeadlineExceeded, InvalidImage, RequestError
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.media.pdf_fonts import installed_fonts
from saccade.media.pdf_pages import PdfPage
from saccade.models import load_layout, load_pixels
from saccade.transport.shared_memory import read_slot

pytestmark = pytest.mark.asyncio(loop_scope="module")
FAMILY = "qwen3_vl"
JAPANESE = pdf_texts.page(pdf_texts.collection("日本語", b"Japan1", b"UniJIS-UTF16-H"))
WHOLE = {
    "text": pdfs.pdf(pdfs.TEXT, pdfs.SQUARE),
    "a field": pdf_forms.filled(pdf_forms.text(b"PAID", shown=b"PAID")),
    "a field to be made": pdf_forms.filled(pdf_forms.choice(b"Pear"), pdf_forms.NEED),
    "Japanese": JAPANESE,
}
LAYOUT = load_layout(FAMILY)({}, {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    with decode_servers.shared():
        pool = DecodePool(MediaSettings(num_decode_processes=1, decode_timeout_seconds=1, shared_memory_bytes=64 << 20))
    await pool.start()
    yield pool
    await pool.close()


async def prepared(pool: DecodePool, encoded: bytes, page: PdfPage) -> PreparedImage:
    layout = LAYOUT.image(page.width, page.height, LAYOUT.settings)
    return await pool.prepare_image(encoded, FAMILY, LAYOUT.settings, layout, page=page)


@table("name", WHOLE)
async def test_drawn_page_is_equal_in_a_confined_process(pool: DecodePool, name: str) -> None:
    expected = drawn(WHOLE[name], fonts=installed_fonts(None))
    pixels = await pool.drawing(WHOLE[name], PdfPage(0, expected.shape[1], expected.shape[0]))
    np.testing.assert_array_equal(np.frombuffer(pixels, np.uint8).reshape(expected.shape), expected)


@table("name", pdfs.HARMLESS)
async def test_patches_are_equal_in_a_confined_process(pool: DecodePool, name: str) -> None:
    encoded, before = pdfs.HARMLESS[name], pool.pids
    [page] = await pool.pdf_pages(encoded)
    made = await prepared(pool, encoded, page)
    layout = LAYOUT.image(page.width, page.height, LAYOUT.settings)
    expected = np.empty(layout.pixel_shape, np.uint8)
    load_pixels(FAMILY)(LAYOUT.settings).write_pixels(drawn(encoded), layout, expected)
    assert made.slot is not None
    assert read_slot(made.slot) == expected.tobytes()
    pool.release([made.slot.name])
    assert (pool.pids, pool.num_slots, pool.queue.in_flight_bytes) == (before, 0, 0)


@table("name", pdfs.BROKEN)
async def test_broken_pdf_costs_one_request(pool: DecodePool, name: str) -> None:
    encoded, beginning = pdfs.BROKEN[name]
    before = pool.pids
    with pytest.raises(RequestError) as caught:
        await pool.pdf_pages(encoded)
    assert caught.value.message.startswith(beginning)
    assert (pool.pids, pool.queue.num_running) == (before, 0)


@table("seed", range(10))
@table("kind", WHOLE)
async def test_damaged_pdf_costs_one_request_at_most(pool: DecodePool, kind: str, seed: int) -> None:
    content, draw = bytearray(WHOLE[kind]), np.random.default_rng(seed)
    for place in draw.integers(4, len(content), 20):
        content[place] = draw.integers(256)
    await costs_one_request_at_most(pool, bytes(content))


HOSTILE = pdf_forms.HOSTILE | pdf_texts.HOSTILE


@pytest.mark.ci
@table("name", HOSTILE)
async def test_hostile_fields_and_fonts_cost_one_request_at_most(pool: DecodePool, name: str) -> None:
    await costs_one_request_at_most(pool, HOSTILE[name])


async def test_text_is_drawn_with_the_fonts_of_the_process(pool: DecodePool) -> None:
    before = pool.pids
    for encoded in (JAPANESE, pdf_texts.page(pdf_texts.simple("Дата"))):
        [page] = await pool.pdf_pages(encoded)
        made = await prepared(pool, encoded, page)
        layout = LAYOUT.image(page.width, page.height, LAYOUT.settings)
        expected = np.empty(layout.pixel_shape, np.uint8)
        image = drawn(encoded, fonts=installed_fonts(None))
        load_pixels(FAMILY)(LAYOUT.settings).write_pixels(image, layout, expected)
        assert made.slot is not None
        assert read_slot(made.slot) == expected.tobytes()
        pool.release([made.slot.name])
    assert pool.pids == before


async def costs_one_request_at_most(pool: DecodePool, encoded: bytes) -> None:
    try:
        for page in await pool.pdf_pages(encoded):
            made = await prepared(pool, encoded, page)
            assert made.slot is not None
            pool.release([made.slot.name])
    except (RequestError, DeadlineExceeded):
        pass
    assert await pool.pdf_pages(pdfs.pdf(b"")) == [PdfPage(0, 400, 200)]
    assert (pool.num_slots, pool.queue.num_running) == (0, 0)


async def test_page_that_takes_too_long_ends_one_request(pool: DecodePool) -> None:
    encoded = pdfs.laughs()
    [page] = await pool.pdf_pages(encoded)
    with pytest.raises(DeadlineExceeded, match="Decoding the PDF took longer than 1 seconds"):
        await prepared(pool, encoded, page)
    assert await pool.pdf_pages(pdfs.pdf(b"")) == [PdfPage(0, 400, 200)]


async def test_page_with_an_image_beyond_memory_ends_one_request(pool: DecodePool) -> None:
    encoded = pdfs.large_image()
    [page] = await pool.pdf_pages(encoded)
    try:
        made = await prepared(pool, encoded, page)
        pool.release([made.slot.name] if made.slot else [])
    except (InvalidImage, DeadlineExceeded):
        pass
    assert await pool.pdf_pages(pdfs.pdf(b"")) == [PdfPage(0, 400, 200)]
    assert (pool.num_slots, pool.queue.num_running) == (0, 0)
