"""A step to tensors: rows, slots, positions and what images fill."""

from array import array

import numpy as np
import pytest
import torch

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import Chunk, StepInput, TableChange
from saccade.engine.core.step_builder import Rows, StepBuilder
from saccade.engine.executor import batch
from saccade.engine.executor.batch import Batch, RowBuffers, build_batch
from saccade.models.positions import GridSpan, MultimodalPositions
from saccade.nn.transfer import transfer
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

CPU = torch.device("cpu")
CACHE = EncoderCache(0)


def sequence(length: int, computed: int, table: list[int], *spans: Span, answer: int = 0) -> Sequence:
    media = tuple(
        MediaItem(modality="video", content_hash=bytes(32), grid=(1, 4, 4), spans=spans, pixel_shape=(16, 768))
        for _ in spans[:1]
    )
    request = EngineRequest(
        request_id="a", token_ids=list(range(length)), sampling=SamplingParams(max_tokens=9), media=media
    )
    positions = MultimodalPositions([GridSpan(span.start, (1, 1, span.length)) for span in spans])
    made = Sequence(0, request, 0, 0, b"", positions)
    made.token_ids += [100 + index for index in range(answer)]
    made.num_computed_tokens = made.num_launched_tokens = computed
    made.tables[0].blocks = array("q", table)
    for image in made.images:
        CACHE.begin_image(image.key, 1)
    return made


def laid_out(
    chunks: dict[Sequence, int], looks_ahead: bool = False, window: int | None = None
) -> tuple[StepInput, Batch]:
    """The step of *chunks*, and the tensors that an executor makes of it."""
    step = StepBuilder(Rows(8), CACHE).build(Schedule(chunks)).step
    rows = RowBuffers(8, CPU)
    rows.start_rows(step.started)
    rows.change_tables(step.tables)
    return step, build_batch(step.chunks, rows, 4, CPU, looks_ahead=looks_ahead, window=window)


def test_decodes_come_first_and_unfinished_prefills_are_not_sampled() -> None:
    chunk, decode = sequence(9, 2, [5, 3, 8]), sequence(4, 6, [7, 2], answer=3)
    last = sequence(6, 3, [1, 4])
    step, batch = laid_out({chunk: 4, decode: 1, last: 3})
    assert batch.input_ids.tolist() == [102, 2, 3, 4, 5, 3, 4, 5]
    assert batch.layout.slot_mapping.tolist() == [2 * 4 + 2, 22, 23, 12, 13, 7, 16, 17]
    assert batch.positions.tolist() == [[6, 2, 3, 4, 5, 3, 4, 5]] * 3
    assert (batch.layout.num_decodes, batch.layout.query_lengths) == (1, (1, 4, 3))
    assert batch.layout.context_lengths.tolist() == list(batch.layout.host_context_lengths) == [7, 6, 6]
    assert batch.layout.block_tables[0, :2].tolist() == [7, 2]
    assert [start.position_delta for start in step.started] == [0, 0, 0]
    assert batch.drawing == (decode.row, last.row)
    assert batch.sample_rows.tolist() == [0, 7]
    assert batch.media_rows is None


def test_chunk_slices_an_item_of_two_spans() -> None:  # [eng] 24
    split = sequence(12, 3, [0, 1, 2], Span(2, 2), Span(6, 4))
    one = sequence(12, 7, [3, 4, 5], Span(2, 2), Span(6, 4))
    _, batch = laid_out({split: 5, one: 1})
    assert batch.media_rows is not None
    assert batch.media_rows.tolist() == [0, 1, 4, 5]
    assert [(part.start, part.stop) for part in batch.media] == [(3, 4), (1, 2), (2, 4)]
    assert batch.positions[2].tolist() == [7, 3, 4, 5, 6, 7]
    assert batch.positions[0].tolist() == [6, 2, 4, 5, 6, 6]


def test_tokens_of_media_see_to_the_end_of_their_run() -> None:
    split = sequence(12, 3, [0, 1, 2], Span(2, 2), Span(6, 4))
    text, decode = sequence(9, 2, [5, 3, 8]), sequence(4, 6, [7, 2], answer=3)
    _, batch = laid_out({split: 8, text: 2, decode: 1}, looks_ahead=True)
    assert batch.layout.horizons is not None
    assert batch.layout.horizons.tolist() == [7, 4, 5, 6, 10, 10, 10, 10, 11, 3, 4]
    assert laid_out({sequence(9, 2, [5, 3, 8]): 2}, looks_ahead=True)[1].layout.horizons is None
    assert laid_out({sequence(12, 3, [0, 1, 2], Span(2, 2), Span(6, 4)): 8})[1].layout.horizons is None


def test_layers_with_a_window_begin_at_the_first_block_that_they_see() -> None:
    """Token 15 sees tokens 10 to 15, from block 2 on, whose first blocks were given back; token 6 sees 1 to 6."""
    span = Span(15, 3)
    chunk, decode = sequence(20, 15, [10, 11, 12, 13, 14], span), sequence(4, 6, [7, 2], answer=3)
    chunk.tables[1].blocks, chunk.tables[1].num_passed = array("q", [0, 0, 3, 5, 4]), 2
    decode.tables[1].blocks = array("q", [1, 6])
    step, batch = laid_out({chunk: 5, decode: 1}, looks_ahead=True, window=6)
    assert [(change.start, change.blocks) for change in step.tables if change.in_window] == [
        (0, (1, 6)),
        (2, (3, 5, 4)),
    ]
    whole, windowed = batch.layout, batch.windowed
    assert windowed is not None
    assert whole.host_context_lengths == (7, 20)
    assert windowed.host_context_lengths == tuple(windowed.context_lengths.tolist()) == (7, 12)
    assert windowed.block_tables.tolist() == [[1, 6, 0], [3, 5, 4]]
    assert windowed.slot_mapping.tolist() == [6 * 4 + 2, 5 * 4 + 3, 16, 17, 18, 19]
    assert whole.slot_mapping.tolist() == [2 * 4 + 2, 13 * 4 + 3, 56, 57, 58, 59]
    assert whole.horizons is not None
    assert windowed.horizons is not None
    assert whole.horizons.tolist() == [7, 18, 18, 18, 19, 20]
    assert windowed.horizons.tolist() == [7, 10, 10, 10, 11, 12]
    assert (windowed.query_lengths, windowed.num_decodes) == (whole.query_lengths, 1)
    assert laid_out({sequence(9, 2, [5, 3, 8]): 2})[1].windowed is None


def test_tables_on_the_device_follow_the_changes() -> None:
    draw = np.random.default_rng(0)
    rows = RowBuffers(4, CPU)
    lengths = [0] * 4
    for _ in range(60):
        changes = []
        for row in draw.permutation(4)[: draw.integers(1, 4)].tolist():
            start = int(draw.integers(0, lengths[row] + 1))
            blocks = tuple(draw.integers(0, 999, draw.integers(1, 30)).tolist())
            changes.append(TableChange(row, start, blocks))
            lengths[row] = start + len(blocks)
        chunks = [Chunk(row, 4 * length - 1, 1, (7,)) for row, length in enumerate(lengths) if length]
        rows.change_tables(changes)
        tables = build_batch(chunks, rows, 4, CPU).layout.block_tables
        assert tables.shape[1] == max(lengths)
        for table, chunk in zip(tables.tolist(), chunks, strict=True):
            assert table[: lengths[chunk.row]] == rows.tables[chunk.row, : lengths[chunk.row]].tolist()
    assert rows.tables.shape[1] > 64


def test_no_step_sends_whole_tables_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowBuffers(2, torch.device("meta"))
    rows.change_tables([TableChange(0, 0, tuple(range(5000))), TableChange(1, 0, (9,))])
    sent = []
    monkeypatch.setattr(batch, "transfer", lambda arrays, device: sent.extend(arrays) or transfer(arrays, device))
    chunks = [Chunk(row, position, 1, (7,), draws=True) for row, position in enumerate((4 * 5000 - 1, 2))]
    layout = build_batch(chunks, rows, 4, torch.device("meta")).layout
    assert layout.block_tables.shape == (2, 5000)
    assert sum(array.size for array in sent) < 40
