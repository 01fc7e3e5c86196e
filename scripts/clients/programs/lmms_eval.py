"""lmms-eval: the requests of its model `openai`, release 0.7.3, sent by the SDK that it uses.

Its own package needs torchvision and fifty other packages, so it is not installed.
"""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

from typing import Any

import openai
from questions import ABOUT_VIDEO, CALLER, IMAGE_SAYS, IMAGE_URL, KEY, QUESTION, READER, Target
from results import expect, tell

TEXT = {"type": "text", "text": QUESTION}
IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}


def ask(target: Target, messages: list[Any], **extra: Any) -> Any:
    """What lmms-eval takes of an answer: the first choice and the usage."""
    client = openai.OpenAI(base_url=target.url, api_key=KEY, max_retries=0)
    answer: Any = client.chat.completions.create(
        model=target.model, messages=messages, max_tokens=16, temperature=0, extra_body=extra or None
    )
    expect(answer.usage.completion_tokens > 0, True)
    return answer.choices[0]


def image() -> None:
    """A question whose image comes before its text, as in most tasks."""
    expect(ask(READER, [{"role": "user", "content": [IMAGE, TEXT]}]).message.content, IMAGE_SAYS)


def several() -> None:
    """Two images between texts, as in tasks with several images."""
    content = [TEXT, IMAGE, {"type": "text", "text": "and"}, IMAGE]
    expect(ask(CALLER, [{"role": "user", "content": content}]).finish_reason, "length", "stop")


def video() -> None:
    """`pass_video_url`: the server chooses as many frames as the task names."""
    choice = ask(READER, ABOUT_VIDEO, media_io_kwargs={"video": {"num_frames": 2}})
    expect(choice.message.content, IMAGE_SAYS)


def thinking() -> None:
    """`enable_thinking_kwarg`: a switch of the chat template, which may have no effect."""
    choice = ask(READER, [{"role": "user", "content": [IMAGE, TEXT]}], chat_template_kwargs={"enable_thinking": False})
    expect(choice.message.content, IMAGE_SAYS)


tell(
    "lmms-eval 0.7.3's requests, by openai-python",
    "openai",
    {
        "a question with an image": image,
        "a question with two images": several,
        "a video, with `num_frames`": video,
        "`enable_thinking`": thinking,
    },
)
