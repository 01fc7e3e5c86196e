"""Limits that stand in a part are those of `mm_processor_kwargs`, for that image or video alone, in each API."""

import base64
from typing import Any

import scripted
from clips import clip
from images import encode, random_image
from tables import table

from saccade.connectors.vllm.client import REFUSALS_OF_CHATS

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PNG = base64.b64encode(encode(random_image(640, 480))).decode()
IMAGE = f"data:image/png;base64,{PNG}"
VIDEO = f"data:video/mp4;base64,{base64.b64encode(clip(width=128, height=96, num_frames=24)).decode()}"
PLACE = "messages[0].content[0]"
Request = tuple[str, dict[str, Any]]


def chat_of(*parts: dict[str, Any], **fields: Any) -> Request:
    return CHATS, {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 9, **fields}


def image(beside: Any = (), within: Any = (), **fields: Any) -> Request:
    return chat_of({"type": "image_url", "image_url": {"url": IMAGE, **dict(within)}, **dict(beside)}, **fields)


def video(beside: Any = (), within: Any = (), **fields: Any) -> Request:
    return chat_of({"type": "video_url", "video_url": {"url": VIDEO, **dict(within)}, **dict(beside)}, **fields)


def block(beside: Any = (), within: Any = ()) -> Request:
    source = {"type": "base64", "media_type": "image/png", "data": PNG, **dict(within)}
    return MESSAGES, chat_of({"type": "image", "source": source, **dict(beside)})[1]


def item(**limits: Any) -> Request:
    parts = [{"type": "input_image", "image_url": IMAGE, **limits}]
    return RESPONSES, {"input": [{"role": "user", "content": parts}], "max_output_tokens": 9}


def media_of(gateway: scripted.Gateway, request: Request) -> list[tuple[Any, ...]]:
    """Return what the worker gets of each image or video."""
    gateway.answer_two_tokens()
    path, body = request
    answer = gateway.ask("POST", path, {"model": "tiny", **body})
    assert answer.status == 200, answer.body
    assert "ignored" not in answer.headers.get("x-saccade-warning", "")
    return [(one.content_hash, one.grid, one.seconds_per_group) for one in gateway.worker.requests[-1].media]


SMALL, SIDES = {"max_pixels": 65536, "min_pixels": 1024}, {"resized_height": 96, "resized_width": 160}
ONE_FPS, FOUR = {"fps": 1}, {"num_frames": 4}


@table(
    ("request_", "same"),
    [
        (image(SMALL), image(mm_processor_kwargs=SMALL)),
        (image((), SMALL), image(mm_processor_kwargs=SMALL)),
        (image({"max_pixels": 65536}, {"min_pixels": 1024}), image(mm_processor_kwargs=SMALL)),
        (image(SMALL, mm_processor_kwargs={"max_pixels": 90000}), image(mm_processor_kwargs=SMALL)),
        (image({"max_pixels": 65536.0}), image(mm_processor_kwargs={"max_pixels": 65536})),
        (image(SIDES), image(mm_processor_kwargs=SIDES)),
        (image((), SIDES), image(mm_processor_kwargs=SIDES)),
        (chat_of({"type": "image", "image": IMAGE}), image()),
        (chat_of({"type": "image", "image": IMAGE, **SMALL}), image(SMALL)),
        (chat_of({"type": "image", "image": {"url": IMAGE, **SMALL}}), image(SMALL)),
        (chat_of({"type": "image_url", "image_url": IMAGE, **SMALL}), image(SMALL)),
        (chat_of({"type": "file", "file": {"file_data": IMAGE}, **SMALL}), image(SMALL)),
        (chat_of({"type": "file", "file": {"file_data": IMAGE, **SMALL}}), image(SMALL)),
        (block(SMALL), image(SMALL)),
        (block((), SMALL), image(SMALL)),
        (block(SIDES), image(SIDES)),
        (item(**SMALL), image(SMALL)),
        (item(**SIDES), image(SIDES)),
        (video(ONE_FPS), video(mm_processor_kwargs=ONE_FPS)),
        (video((), ONE_FPS), video(mm_processor_kwargs=ONE_FPS)),
        (video(ONE_FPS, mm_processor_kwargs=FOUR), video(ONE_FPS)),
        (video(FOUR), video(mm_processor_kwargs=FOUR)),
        (video({"nframes": 4}), video(FOUR)),
        (video({"fps": 4, "max_frames": 4}), video(FOUR)),
        (video({"fps": 0.1, "min_frames": 4}), video(FOUR)),
        (video({"max_frames": 4}), video(mm_processor_kwargs={"max_frames": 4})),
        (video(SIDES), video(mm_processor_kwargs=SIDES)),
        (video({"total_pixels": 65536}), video(mm_processor_kwargs={"total_pixels": 65536})),
        (chat_of({"type": "video", "video": VIDEO}), video()),
        (chat_of({"type": "video", "video": VIDEO, **ONE_FPS}), video(ONE_FPS)),
        (chat_of({"type": "video", "video": {"url": VIDEO, **ONE_FPS}}), video(ONE_FPS)),
    ],
)
def test_limits_of_a_part_are_those_of_the_request(request_: Request, same: Request, gateway: scripted.Gateway) -> None:
    grids = [[one[1:] for one in media_of(gateway, request)] for request in (request_, same)]
    assert grids[0] == grids[1]


@table("request_, plain", [(image(SMALL), image()), (image(SIDES), image()), (video(ONE_FPS), video()), (video({"max_frames": 4}), video()), (video({"total_pixels": 65536}), video()), (video(SIDES), video())])  # fmt: skip
def test_limits_are_a_part_of_the_identity(request_: Request, plain: Request, gateway: scripted.Gateway) -> None:
    [(limited, small, _)], [(other, whole, _)] = media_of(gateway, request_), media_of(gateway, plain)
    assert (limited != other, small != whole) == (True, True)


@table(
    ("limits", "grid"),
    [
        ({"max_pixels": 8192}, (4, 6)),
        ({"max_pixels": 8192, "nframes": 4}, (4, 6)),
        ({"max_pixels": 3072}, (2, 4)),
        ({"min_pixels": 40000}, (12, 16)),
        ({"min_pixels": 1024, "max_pixels": 10**6}, (6, 8)),
    ],
)
def test_pixels_of_a_videos_part_are_those_of_a_frame(
    limits: dict[str, int], grid: tuple[int, int], gateway: scripted.Gateway
) -> None:
    """As qwen-vl-utils reads them, whatever the release's processor counts."""
    for request in (video(limits), video((), limits)):
        [(_, seen, _)] = media_of(gateway, request)
        assert seen[1:] == grid


def test_a_total_of_pixels_counts_a_group_of_frames_once(gateway: scripted.Gateway) -> None:
    """As qwen-vl-utils counts: eight frames of 64 x 64 pixels in groups of two."""
    [(_, grid, _)] = media_of(gateway, video({"nframes": 8, "total_pixels": 4 * 64 * 96}))
    assert grid == (4, 4, 4)


def test_other_parts_keep_their_size(gateway: scripted.Gateway) -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}, **fields} for fields in (SMALL, {}, SIDES)]
    alone = [media_of(gateway, request)[0][1] for request in (image(SMALL), image(), image(SIDES))]
    assert [grid for _, grid, _ in media_of(gateway, chat_of(*parts))] == alone
    assert alone[2] == (1, 6, 10)


@table(
    ("request_", "param"),
    [
        *((image({"max_pixels": value}), f"{PLACE}.max_pixels") for value in (0, -1, 1.5, True, "9", [9], 10**30)),
        (image({"max_pixels": [0] * 99}), f"{PLACE}.max_pixels"),
        (image((), {"max_pixels": 0}), f"{PLACE}.image_url.max_pixels"),
        (image({"max_pixels": 9}, {"max_pixels": 9}), f"{PLACE}.image_url.max_pixels"),
        (image({"min_pixels": 6, "max_pixels": 5}), PLACE),
        (image({"max_pixels": 9}), f"{PLACE}.max_pixels"),
        (image((), {"max_pixels": 9}), f"{PLACE}.image_url.max_pixels"),
        (image({"min_pixels": 10**8}), f"{PLACE}.min_pixels"),
        (image({"resized_height": 9}), PLACE),
        (image({"resized_height": 9, "resized_width": 10**6}), f"{PLACE}.resized_width"),
        (image({"resized_height": 9, "resized_width": 9000}), f"{PLACE}.image_url.url"),
        (video({"fps": 0}), f"{PLACE}.fps"),
        (video({"fps": 1, "num_frames": 4}), f"{PLACE}.fps"),
        (video({"fps": 1}, {"nframes": 4}), f"{PLACE}.fps"),
        (video({"min_frames": 5, "max_frames": 4}), PLACE),
        (video({"max_frames": 0}), f"{PLACE}.max_frames"),
        (video({"max_pixels": 1023}), f"{PLACE}.max_pixels"),
        (video((), {"max_pixels": 1}), f"{PLACE}.video_url.max_pixels"),
        (video((), {"total_pixels": "9"}), f"{PLACE}.video_url.total_pixels"),
        (chat_of({"type": "image"}), f"{PLACE}.image"),
        (chat_of({"type": "video", "video": ""}), f"{PLACE}.video"),
        (chat_of({"type": "image", "image": IMAGE, "image_url": IMAGE}), f"{PLACE}.image_url"),
        (block({"max_pixels": 0}), f"{PLACE}.max_pixels"),
        (block((), {"max_pixels": 9}), f"{PLACE}.source.max_pixels"),
        (item(max_pixels=9), "input[0].content[0].max_pixels"),
        (item(resized_width=9), "input[0].content[0]"),
    ],
)
def test_errors_name_the_limit_of_the_part(request_: Request, param: str, gateway: scripted.Gateway) -> None:
    path, body = request_
    refused = gateway.ask("POST", path, {"model": "tiny", **body})
    assert refused.status == 400, refused.body
    error = refused.json["error"]
    assert error.get("param", param) == param


@table(
    ("request_", "param"),
    [
        (image(SMALL), f"{PLACE}.min_pixels"),
        (image((), SIDES), f"{PLACE}.image_url.resized_height"),
        (block({"max_pixels": 90000}), f"{PLACE}.max_pixels"),
        (item(max_pixels=90000), "input[0].content[0].max_pixels"),
        ((MESSAGES, {"messages": [{"role": "assistant", "content": "a"}], "max_tokens": 9}), "messages"),
        (
            (CHATS, {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True}),
            "continue_final_message",
        ),
    ],
)
def test_workers_that_take_chats_only_refuse_limits_by_name(
    request_: Request, param: str, gateway: scripted.Gateway
) -> None:
    path, body = request_
    gateway.worker.become(refusals=REFUSALS_OF_CHATS)
    try:
        refused = gateway.ask("POST", path, {"model": "tiny", **body})
    finally:
        gateway.worker.become(description=gateway.worker.state.description)
    assert refused.status == 400
    assert f"`{param}`" in refused.json["error"]["message"]
    assert "`messages` is not served" not in refused.json["error"]["message"]
