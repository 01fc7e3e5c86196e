"""VLMEvalKit: its API `GPT4V`, which it uses for servers that have OpenAI's API, asks questions.

The package is built from VLMEvalKit, which is on no index under its own name. It needs torch and fifty other packages
for its models and data sets, so these are not installed, and only the modules of this API are imported.
"""

# /// script
# dependencies = [
#     "filelock==4.3.1", "huggingface-hub==2.4.0", "numpy==2.4.6", "pandas==3.1.1", "pillow==13.0.0",
#     "requests==2.34.2", "sty==1.0.6", "tqdm==4.70.1", "validators==0.36.0",
# ]
# alone = ["ms-vlmeval==0.0.20"]
# ///

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from questions import CALLER, IMAGE, IMAGE_SAYS, KEY, QUESTION, READER, Target
from results import expect, tell

TEXT = {"type": "text", "value": QUESTION}
PICTURE = {"type": "image", "value": str(IMAGE)}
FAILED = "Failed to obtain answer via API."


def skip_models_and_data_sets() -> None:
    """Let modules of the package be imported without its __init__, which imports all models and data sets."""
    [folder] = importlib.util.find_spec("vlmeval").submodule_search_locations  # type: ignore[union-attr]
    for name, path in (("vlmeval", Path(folder)), ("vlmeval.api", Path(folder) / "api")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package


def ask(target: Target, message: list[Any], **settings: Any) -> str:
    """What VLMEvalKit takes for the answer to *message*."""
    model = importlib.import_module("vlmeval.api.gpt").GPT4V(
        target.model,
        api_base=f"{target.url}/chat/completions",
        key=KEY,
        max_tokens=16,
        retry=1,
        timeout=100,
        **settings,
    )
    answer: str = model.generate(message)
    expect(FAILED in answer, False)
    return answer


def image() -> None:
    """A question about an image, in the order of most data sets."""
    expect(ask(READER, [PICTURE, TEXT]), IMAGE_SAYS)


def high_detail() -> None:
    """The settings of its configurations for large images."""
    expect(ask(READER, [PICTURE, TEXT], img_size=512, img_detail="high"), IMAGE_SAYS)


def several() -> None:
    """A system prompt, and images between texts."""
    ask(CALLER, [TEXT, PICTURE, {"type": "text", "value": "and"}, PICTURE], system_prompt="Be short.")


def judge() -> None:
    """A question without images, as for a judge of answers."""
    ask(CALLER, [{"type": "text", "value": "Is 2 the same as two?"}], temperature=0)


skip_models_and_data_sets()
tell(
    "VLMEvalKit",
    "ms-vlmeval",
    {
        "`GPT4V`: a question with an image": image,
        "the same with `img_size` and `img_detail`": high_detail,
        "two images and a system prompt": several,
        "a judge's question without images": judge,
    },
)
