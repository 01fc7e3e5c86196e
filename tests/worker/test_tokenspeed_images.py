"""Images of TokenSpeed's wire: pixels back to uint8, what is refused, files of /dev/shm, identity."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from tables import table
from tokenspeed_requests import Model, in_file, tensor

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.protocol.media import MediaItem
from saccade.transport.shared_memory import FOLDER, SlotPool
from saccade.worker.tokenspeed import tensors
from saccade.worker.tokenspeed.images import SALT, pad_value
from saccade.worker.tokenspeed.requests import engine_request

NAMES = ["qwen3_vl", "kimi_k25", "qwen2_vl"]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, network_folder: Callable[[str], Path]) -> Model:
    return Model(network_folder(request.param), request.param)


@pytest.fixture
def qwen(network_folder: Callable[[str], Path]) -> Model:
    return Model(network_folder("qwen3_vl"), "qwen3_vl")


def read(model: Model, *items: pb.MultimodalItem) -> tuple[MediaItem, ...]:
    return engine_request(model.message(*items), model.wire, "1").media


def refused(model: Model, item: pb.MultimodalItem, kind: type[RequestError] = InvalidValue) -> RequestError:
    """The error of a request with *item*, which names the item or what is in it."""
    with pytest.raises(kind) as caught:
        read(model, item)
    assert "mm_inputs.items[0]" in str(caught.value.param) + caught.value.message
    return caught.value


def test_pixels_equal_those_of_the_native_wire(model: Model) -> None:  # A7
    for dtype in {"float32", model.wire.pixel_dtype}:
        (item,) = read(model, model.item(seed=3, dtype=dtype))
        layout, patches = model.prepared(3, "uint8")
        assert item.inline == patches.tobytes()
        assert (item.grid, item.pixel_shape, item.pixel_dtype) == (layout.grid, layout.pixel_shape, "uint8")


def test_gateways_are_asked_for_values_that_can_be_told_apart(network_folder: Callable[[str], Path]) -> None:
    asked = {name: Model(network_folder(name), name).wire.pixel_dtype for name in NAMES}
    assert asked == {"qwen3_vl": "bfloat16", "kimi_k25": "bfloat16", "qwen2_vl": "float32"}


def test_bfloat16_that_cannot_be_told_apart_is_refused(network_folder: Callable[[str], Path]) -> None:
    model = Model(network_folder("qwen2_vl"), "qwen2_vl")
    assert "float32" in refused(model, model.item(dtype="bfloat16"), UnsupportedParameter).message


def test_equal_hashes_of_different_pixels_are_different_images(qwen: Model) -> None:  # F3
    first, second = qwen.item(seed=1, content_hash=b"h" * 32), qwen.item(seed=2, content_hash=b"h" * 32, start=82)
    one, other = read(qwen, first, second)
    assert one.inline != other.inline
    assert one.content_hash != other.content_hash
    assert (
        pad_value(one.content_hash) == pad_value(other.content_hash) == 1_000_000 + int.from_bytes(b"h" * 8) % 715494549
    )


def test_hashes_are_in_a_namespace_of_their_own(qwen: Model) -> None:
    request = engine_request(qwen.message(qwen.item()), qwen.wire, "1")
    assert request.salt == SALT
    assert len(request.media[0].content_hash) == 32
    assert request.media[0].content_hash != qwen.item().content_hash


@pytest.mark.parametrize("declared", [b"", b"ab"])
def test_a_short_hash_is_no_error(qwen: Model, declared: bytes) -> None:
    (item,) = read(qwen, qwen.item(content_hash=declared))
    assert len(item.content_hash) == 32


def test_frames_that_differ_are_refused(qwen: Model) -> None:
    item = qwen.item()
    values = np.frombuffer(item.encoder_input.inline, np.uint16).copy()
    values[16 * 16] = values[0] ^ 0x8000  # the second frame's first value
    item.encoder_input.inline = values.tobytes()
    assert "frames" in refused(qwen, item).message


def test_a_resized_value_is_refused(qwen: Model) -> None:
    item = qwen.item(dtype="float32")
    item.encoder_input.inline = (np.frombuffer(item.encoder_input.inline, np.float32) * np.float32(0.999)).tobytes()
    assert "256 levels" in refused(qwen, item).message


def changed(item: pb.MultimodalItem, **fields: Any) -> pb.MultimodalItem:
    for name, value in fields.items():
        item.ClearField(name)
        if isinstance(value, list):
            getattr(item, name).extend(value)
        elif isinstance(value, pb.TensorData):
            getattr(item, name).CopyFrom(value)
        elif value is not None:
            setattr(item, name, value)
    return item


GRID = np.array([[1, 16, 20]], np.int64)


@table(
    "fields",
    [
        {"placeholder_token_id": 1},
        {"placeholders": []},
        {"placeholders": [pb.PlaceholderRange(offset=2, length=79)]},
        {"encoder_input": pb.TensorData(shape=[320, 1536], dtype="bfloat16")},
        {"encoder_input": pb.TensorData(shape=[320, 1536], dtype="bfloat16", inline=b"short")},
        {"encoder_input": pb.TensorData(shape=[319, 1536], dtype="bfloat16", inline=bytes(319 * 1536 * 2))},
    ],
)
def test_inconsistent_item_is_refused(qwen: Model, fields: dict[str, Any]) -> None:
    refused(qwen, changed(qwen.item(), **fields))


@table(
    "fields",
    [
        {"modality": common_pb2.VIDEO},
        {"modality": common_pb2.AUDIO},
        {"modality": 77},
        {"encoder_input": None},
        {"encoder_input": pb.TensorData(shape=[320, 1536], dtype="float16", inline=bytes(320 * 1536 * 2))},
        {
            "encoder_input": pb.TensorData(
                shape=[320, 1536], dtype="bfloat16", remote=common_pb2.RemoteTensorHandle(transport="nixl")
            )
        },
    ],
)
def test_unserved_fields_are_refused_by_name(qwen: Model, fields: dict[str, Any]) -> None:
    refused(qwen, changed(qwen.item(), **fields), UnsupportedParameter)


@table(
    ("name", "given"),
    [
        ("image_grid_thw", tensor(np.array([[1, 16, 18]], np.int64))),
        ("image_grid_thw", tensor(np.array([[2, 16, 10]], np.int64))),
        ("image_grid_thw", tensor(np.array([[1, 15, 20]], np.int64))),
        ("image_grid_thw", tensor(np.array([[1, -16, -20]], np.int64))),
        ("image_grid_thw", tensor(np.array([[1, 16]], np.int64))),
        ("image_grid_thw", tensor(np.array([GRID[0], GRID[0]]))),
        ("image_grid_thw", tensor(GRID.astype(np.float32), "float32")),
        ("patches_per_image", tensor(np.array([300], np.int64))),
    ],
)
def test_a_wrong_grid_is_refused(qwen: Model, name: str, given: pb.TensorData) -> None:
    item = qwen.item()
    item.model_specific_tensors[name].CopyFrom(given)
    with pytest.raises(InvalidValue):
        read(qwen, item)


def test_an_unknown_side_tensor_is_refused(qwen: Model) -> None:
    item = qwen.item()
    item.model_specific_tensors["video_second_per_grid"].CopyFrom(tensor(GRID))
    assert "video_second_per_grid" in refused(qwen, item, UnsupportedParameter).message


def test_a_missing_grid_is_refused(qwen: Model) -> None:
    item = qwen.item()
    del item.model_specific_tensors["image_grid_thw"]
    assert "image_grid_thw" in refused(qwen, item).message


def test_images_of_a_family_without_a_form_on_this_wire(network_folder: Callable[[str], Path], qwen: Model) -> None:
    model = Model(network_folder("phi3_v"), "phi3_v")
    assert model.wire.images is None
    message = qwen.message(qwen.item())
    with pytest.raises(UnsupportedParameter):
        engine_request(message, model.wire, "1")


def test_pixels_in_a_file(qwen: Model) -> None:
    item = qwen.item(seed=4)
    (expected,) = read(qwen, item)
    inline = item.encoder_input
    item = changed(item, encoder_input=in_file(inline))
    (read_from_file,) = read(qwen, item)
    assert read_from_file == expected
    message = qwen.message(item)
    (name,) = tensors.files_of(message)
    assert (FOLDER / name).exists()
    tensors.remove_files(message)
    assert not (FOLDER / name).exists()


def test_pixels_at_an_offset(qwen: Model) -> None:  # our own gateway sends them so
    item = qwen.item(seed=4)
    given = item.encoder_input
    moved = pb.TensorData(shape=given.shape, dtype=given.dtype, inline=bytes(64) + given.inline)
    handle = in_file(moved, offset=64, nbytes=len(given.inline))
    try:
        assert read(qwen, changed(item, encoder_input=handle))[0].inline == read(qwen, qwen.item(seed=4))[0].inline
    finally:
        (FOLDER / handle.shm.name).unlink()


@pytest.mark.parametrize("handle", [{"nbytes": 983040 - 2}, {"offset": 1}, {"offset": 1 << 62}])
def test_a_file_of_another_length_is_refused(qwen: Model, handle: dict[str, int]) -> None:
    item = qwen.item()
    item = changed(item, encoder_input=in_file(item.encoder_input, **handle))
    try:
        refused(qwen, item)
    finally:
        (FOLDER / item.encoder_input.shm.name).unlink()


@table(
    "name",
    [
        "/etc/passwd",
        "../etc/passwd",
        "smg-tokenspeed-1-2-3/../../etc/passwd",
        "..",
        "",
        "smg-tokenspeed-1-2-3\0",
        "//x",
    ],
)
def test_a_name_outside_of_the_folder_is_refused(qwen: Model, name: str) -> None:
    item = qwen.item()
    item.encoder_input.shm.name = name
    item.encoder_input.shm.nbytes = 983040
    assert "shm.name" in refused(qwen, item).message
    assert list(tensors.files_of(qwen.message(item))) == []


def test_another_gateways_slot_is_neither_read_nor_removed(qwen: Model) -> None:
    pool = SlotPool(1 << 22)
    slot = pool.acquire(983040)
    assert slot is not None
    item = qwen.item()
    item.encoder_input.shm.name = slot.ref.name
    item.encoder_input.shm.nbytes = 983040
    try:
        refused(qwen, item)
        tensors.remove_files(qwen.message(item))
        assert (FOLDER / slot.ref.name).exists()
    finally:
        pool.close()


def test_links_and_pipes_are_not_followed(qwen: Model, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(983040))
    name = f"smg-tokenspeed-{os.getpid()}-77-0"
    for make in (lambda path: path.symlink_to(tmp_path / "secret"), os.mkfifo):
        make(FOLDER / name)
        item = qwen.item()
        item.encoder_input.shm.name, item.encoder_input.shm.nbytes = name, 983040
        try:
            refused(qwen, item)
        finally:
            (FOLDER / name).unlink()
