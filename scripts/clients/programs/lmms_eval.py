"""lmms-eval: its model `openai` asks questions as a task does.

Its package needs torchvision and fifty other packages for models of its own. They are not installed, but torch, which
it imports, is Saccade's: pip would fetch the build for GPUs.
"""

# /// script
# dependencies = [
#     "evaluate==0.4.6", "jinja2==3.1.6", "loguru==0.7.3", "networkx==3.6.1", "numpy==2.4.6", "openai==3.54.0",
#     "pillow==13.0.0", "psutil==7.2.2", "python-dotenv==1.2.4", "pytz==2026.6", "sympy==1.14.0", "tenacity==9.2.1",
#     "transformers==5.23.0",
# ]
# alone = ["lmms-eval==0.7.3", "accelerate==1.15.0"]
# ///

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from questions import CALLER, IMAGE, IMAGE_SAYS, KEY, QUESTION, READER, VIDEO_URL, Target
from results import expect, tell

FOLDER = Path(os.environ["WORK_FOLDER"]) / "lmms_eval"
FIND_TORCH = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
TEXT = {"type": "text", "text": QUESTION}
PICTURE = {"type": "image", "url": Image.open(IMAGE)}
FAILED = "[LMMS_EVAL_REQUEST_FAILED"
NUM_QUESTIONS = 4


def find_torch() -> None:
    """Let this program import Saccade's torch."""
    found = subprocess.run([os.environ["SACCADE_PYTHON"], "-c", FIND_TORCH], capture_output=True, text=True, check=True)
    FOLDER.mkdir()
    for path in Path(found.stdout.strip()).parent.glob("torch*"):
        # A torchvision of another build than torch's cannot be loaded.
        if not path.name.startswith("torchvision"):
            (FOLDER / path.name).symlink_to(path)
    sys.path.append(str(FOLDER))


def answers(target: Target, *contents: list[Any], **options: Any) -> list[Any]:
    """What lmms-eval's model answers about a task with a question of each of *contents*."""
    instance = importlib.import_module("lmms_eval.api.instance").Instance
    model = importlib.import_module("lmms_eval.models.chat.openai").OpenAICompatible(
        model=target.model, base_url=target.url, api_key=KEY, max_retries=1, timeout=100, num_concurrent=2, **options
    )
    model.task_dict = {"task": {"test": list(contents)}}
    settings = {"max_new_tokens": 16, "temperature": 0}

    def messages(content: list[Any]) -> list[Any]:
        return [{"role": "user", "content": content}]

    def about(number: int) -> dict[str, Any]:
        return {"task": "task", "doc_id": number, "repeats": 1}

    asked = [
        instance("generate_until", (QUESTION, messages, settings, number, "task", "test"), number, about(number))
        for number in range(len(contents))
    ]
    found = model.generate_until(asked)
    for answer in found:
        expect(answer.text.startswith(FAILED), False)
        expect(answer.token_counts.output_tokens > 0, True)
    return list(found)


def images() -> None:
    """Questions whose image comes before its text, as in most tasks, two at a time."""
    found = answers(READER, *[[PICTURE, TEXT]] * NUM_QUESTIONS)
    expect([answer.text for answer in found], [IMAGE_SAYS] * NUM_QUESTIONS)


def several() -> None:
    """Two images between texts, as in tasks with several images."""
    expect(len(answers(CALLER, [TEXT, PICTURE, {"type": "text", "text": "and"}, PICTURE])), 1)


def video() -> None:
    """`pass_video_url`: the server chooses as many frames as the task names."""
    content = [{"type": "video", "url": VIDEO_URL}, TEXT]
    [answer] = answers(READER, content, pass_video_url=True, max_frames_num=2)
    expect(answer.text, IMAGE_SAYS)


def thinking() -> None:
    """`enable_thinking_kwarg`: a switch of the chat template, which may have no effect."""
    [answer] = answers(READER, [PICTURE, TEXT], enable_thinking_kwarg="false")
    expect(answer.text, IMAGE_SAYS)


os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(FOLDER / "hub")}
find_torch()
tell(
    "lmms-eval",
    "lmms-eval",
    {
        "model `openai`: a task of images": images,
        "a question with two images": several,
        "a video by `pass_video_url`, with `max_frames_num`": video,
        "`enable_thinking_kwarg`": thinking,
    },
)
