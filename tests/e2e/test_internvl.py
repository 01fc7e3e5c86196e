"""InternVL through HTTP, gateway and our worker: its answer is the reference's for the same images. # A1 A4 A10"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clips
import numpy as np
import pytest
import torch
from chats import openai_messages, random_image
from processor_answers import check_answer, check_answers, processed
from references.native import CroppedTiles, load
from references.networks import image_text_model
from server import serving

from saccade.media.video import read_frames, read_header
from saccade.media.video_header import VideoLimits

pytestmark = pytest.mark.conformance


def test_answers_equal_the_reference(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("internvl")
    template, processor = CroppedTiles(folder), load(folder, "AutoProcessor")

    def process(messages: list[Any], images: list[Any]) -> dict[str, Any]:
        return processed(processor, template.render(messages, add_generation_prompt=True, switches={}), images)

    check_answers(folder, process)


@torch.inference_mode()
def test_videos_and_images_equal_the_reference(network_folder: Callable[[str], Path]) -> None:
    folder = network_folder("internvl")
    template, processor = CroppedTiles(folder), load(folder, "AutoProcessor")
    encoded, still = clips.clip(), random_image(300, 60, 1)
    header = read_header(encoded, VideoLimits())
    frames = torch.from_numpy(np.stack(list(read_frames(encoded, header, range(header.num_frames), VideoLimits()))))
    parts: list[Any] = [{"type": "text", "text": "First"}, {"type": "video"}, {"type": "image"}]
    prompt = template.render([{"role": "user", "content": parts}], add_generation_prompt=True, switches={})
    sampled = {"do_sample_frames": True, "num_frames": 6, "video_metadata": [{"total_num_frames": 12, "fps": 4.0}]}
    inputs = processor(
        text=prompt, images=[still], videos=[frames.permute(0, 3, 1, 2)], videos_kwargs=sampled, return_tensors="pt"
    )
    video = {"url": f"data:video/mp4;base64,{base64.b64encode(encoded).decode()}"}
    content = [parts[0], {"type": "video_url", "video_url": video}, *openai_messages(still)[0]["content"]]
    with serving(str(folder), "--max-model-len", "2048") as server:
        check_answer(
            server,
            image_text_model(folder),
            {key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask", "pixel_values")},
            [{"role": "user", "content": content}],
            media_io_kwargs={"video": {"num_frames": 6}},
        )
