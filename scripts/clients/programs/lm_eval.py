"""lm-eval: a task of pictures that it asks as chats; the task is made here, from the bundled picture."""

# /// script
# dependencies = ["lm-eval[api]==0.4.13", "pillow==12.3.0"]
# ///

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
os.environ["HF_HOME"] = os.environ["WORK_FOLDER"] + "/hub"

import json
from pathlib import Path
from typing import Any

import lm_eval
from datasets import Dataset
from lm_eval.tasks import TaskManager
from PIL import Image
from questions import PICTURE, PICTURE_SAYS, QUESTION, READER
from results import expect, tell

FOLDER = Path(os.environ["WORK_FOLDER"]) / "lm_eval"
NUM_QUESTIONS = 4
PICTURES = {
    "task": "pictures",
    "dataset_path": "parquet",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "pictures.parquet")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_image": ["image"],
    "doc_to_text": "<image>{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
"""The task; YAML takes JSON."""


def evaluate(model: str, path: str, task: str, **options: Any) -> Any:
    """What lm-eval finds in *task* by requests to *path*."""
    arguments = {"model": READER.model, "base_url": f"{READER.url}/{path}", "num_concurrent": 2, "max_retries": 1}
    tasks = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model=model, model_args=arguments | options, tasks=[task], task_manager=tasks, apply_chat_template=True
    )
    return found["results"][task]


def pictures() -> None:
    """The bundled model reads each picture."""
    rows = [{"image": Image.open(PICTURE), "question": QUESTION, "answer": PICTURE_SAYS}] * NUM_QUESTIONS
    Dataset.from_list(rows).to_parquet(FOLDER / "pictures.parquet")
    (FOLDER / "pictures.yaml").write_text(json.dumps(PICTURES))
    found = evaluate("local-chat-completions", "chat/completions", "pictures", tokenized_requests=False)
    expect(found["exact_match,none"], 1.0)


FOLDER.mkdir()
tell("lm-eval", "lm-eval", {"`local-chat-completions`: a task of pictures": pictures})
