"""A list of frames is the same video as vLLM's data:video/jpeg, and its URLs are guarded and counted as images."""

import base64
from typing import Any

import scripted
from images import encode, random_image
from tables import table

FRAMES = [base64.b64encode(encode(random_image(64, 48, seed=seed), "JPEG")).decode() for seed in range(4)]
URLS = [f"data:image/jpeg;base64,{frame}" for frame in FRAMES]
JOINED = f"data:video/jpeg;base64,{','.join(FRAMES)}"
PLACE = "messages[0].content[0]"
FPS = {"media_io_kwargs": {"video": {"fps": 2}}}
LARGE = f"data:image/png;base64,{base64.b64encode(encode(random_image(96, 48))).decode()}"


def part(value: Any, name: str = "video", **fields: Any) -> list[dict[str, Any]]:
    return [{"type": name, name: value, **fields}]


@table(
    ("listed", "fields"),
    [
        (part(URLS), {}),
        (part(URLS, "video_url"), {}),
        (part({"url": URLS}), {}),
        (part({"url": URLS}, "video_url"), {}),
        (part(URLS, fps=2), FPS),
        (part(URLS, sample_fps=2), FPS),
        (part({"url": URLS, "fps": 2}, "video_url"), FPS),
        (part(URLS), FPS),
    ],
)
def test_a_list_is_the_video_of_its_frames(listed: Any, fields: dict[str, Any], gateway: scripted.Gateway) -> None:
    seen = []
    for content, more in ((listed, fields if listed == part(URLS) else {}), (part(JOINED, "video_url"), fields)):
        gateway.answer_two_tokens()
        answer = gateway.chat(content, **more)
        assert answer.status == 200, answer.body
        assert "x-saccade-warning" not in answer.headers
        request = gateway.worker.requests[-1]
        seen.append((request.token_ids, [(one.content_hash, one.grid) for one in request.media], gateway.worker.pixels))
    assert seen[0] == seen[1]


@table(
    ("content", "code", "param"),
    [
        (part([]), "invalid_image_url", f"{PLACE}.video"),
        (part([""]), "invalid_image_url", f"{PLACE}.video"),
        (part([1]), "invalid_value", f"{PLACE}.video[0]"),
        (part([], "video_url"), "invalid_image_url", f"{PLACE}.video_url"),
        (part({"url": []}, "video_url"), "invalid_image_url", f"{PLACE}.video_url.url"),
        (part([URLS[0], "data:image/png;base64,?"]), "invalid_base64", f"{PLACE}.video[1]"),
        (part([URLS[0], "data:image/png;base64,aGk="]), "unsupported_image_format", f"{PLACE}.video[1]"),
        (part([URLS[0], "http://127.0.0.1:9/a"]), "invalid_image_url", f"{PLACE}.video[1]"),
        (part([URLS[0], "file:///etc/passwd"]), "invalid_image_url", f"{PLACE}.video[1]"),
        (part([URLS[0], "file-" + "0" * 32]), "file_not_found", f"{PLACE}.video[1]"),
        (part([URLS[0], LARGE]), "invalid_video", f"{PLACE}.video"),
        (part(URLS * 193), "video_too_large", f"{PLACE}.video"),
        (part(URLS, max_frames=3), "video_too_large", f"{PLACE}.video"),
        (part(["https://example.com/a.png"] * 17), "too_many_images", "messages"),
    ],
)
def test_lists_that_are_no_video_are_refused(content: Any, code: str, param: str, gateway: scripted.Gateway) -> None:
    refused = gateway.chat(content)
    assert refused.status in (400, 404), refused.body
    assert (refused.json["error"]["code"], refused.json["error"]["param"]) == (code, param)
