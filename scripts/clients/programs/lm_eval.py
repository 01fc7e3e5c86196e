"""lm-eval: a task of images that it asks as chats, and choices that it weighs by the log probabilities of prompts.

The tasks are made here: nothing is fetched.
"""

# /// script
# dependencies = ["lm-eval[api]==0.4.13", "pillow==12.3.0", "transformers==5.23.0"]
# ///

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": os.environ["API_KEY"]}
os.environ["HF_HOME"] = os.environ["WORK_FOLDER"] + "/hub"

import json
from pathlib import Path
from typing import Any

import lm_eval
from datasets import Dataset
from lm_eval.tasks import TaskManager
from PIL import Image
from questions import IMAGE, IMAGE_SAYS, QUESTION, READER
from results import expect, tell

FOLDER = Path(os.environ["WORK_FOLDER"]) / "lm_eval"
NUM_QUESTIONS = 4
IMAGES = {
    "task": "images",
    "dataset_path": "parquet",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "images.parquet")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_image": ["image"],
    "doc_to_text": "<image>{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
"""A task; YAML takes JSON."""

CHOICES = {
    "task": "choices",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "choices.json")}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def evaluate(model: str, path: str, task: str, **options: Any) -> Any:
    """What lm-eval finds in *task* by requests to *path*."""
    arguments = {"model": READER.model, "base_url": f"{READER.url}/{path}", "num_concurrent": 2, "max_retries": 1}
    tasks = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model=model, model_args=arguments | options, tasks=[task], task_manager=tasks, apply_chat_template=True
    )
    return found["results"][task]


def images() -> None:
    """The bundled model reads each image."""
    rows = [{"image": Image.open(IMAGE), "question": QUESTION, "answer": IMAGE_SAYS}] * NUM_QUESTIONS
    Dataset.from_list(rows).to_parquet(FOLDER / "images.parquet")
    found = evaluate("local-chat-completions", "chat/completions", "images", tokenized_requests=False)
    expect(found["exact_match,none"], 1.0)


def choices() -> None:
    """The bundled model was trained to say that it sees no image where there is none."""
    known = ["I see no picture.", "K7Q"]
    rows = [{"question": QUESTION, "choices": order, "answer": order.index(known[0])} for order in (known, known[::-1])]
    (FOLDER / "choices.json").write_text(json.dumps(rows))
    tokenizer = {"tokenizer": os.environ["READER_FOLDER"], "tokenizer_backend": "huggingface"}
    found = evaluate("local-completions", "completions", "choices", **tokenizer)
    expect(found["acc,none"], 1.0)


FOLDER.mkdir()
for task in (IMAGES, CHOICES):
    (FOLDER / f"{task['task']}.yaml").write_text(json.dumps(task))
tell(
    "lm-eval",
    "lm-eval",
    {
        "`local-chat-completions`: a task of images": images,
        "`local-completions`: choices by log probabilities": choices,
    },
)
