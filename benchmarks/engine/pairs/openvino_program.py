"""OpenVINO GenAI, in its own environment: `python openvino_program.py FOLDER THREADS`.

Each line of standard input is a JSON object with "num_tokens" and "requests" (each with "text" and "png", base64 or
null), and each line of standard output has the seconds of all their answers, and the mean seconds to the first token
and between tokens. One request goes to VLMPipeline, several to ContinuousBatchingPipeline; one of them is in memory at
a time.
"""

import base64
import io
import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from PIL import Image

CACHE_GIB = 1


class Pipelines:
    """Holds the pipeline that was used last."""

    def __init__(self, folder: str, threads: int) -> None:
        self._folder, self._properties = folder, {"INFERENCE_NUM_THREADS": threads}
        self._pipeline: Any = None
        self._batches: bool | None = None

    def pipeline(self, *, batches: bool) -> Any:
        """Return the pipeline for one request, or for several."""
        if batches != self._batches:
            # The old one's memory is free before the new one takes its own.
            self._pipeline = None
            self._pipeline = self._warm_batching() if batches else self._warm_single()
            self._batches = batches
        return self._pipeline

    def _warm_single(self) -> Any:
        pipeline = openvino_genai.VLMPipeline(self._folder, "CPU", **self._properties)
        pipeline.generate("hi", images=[blank()], generation_config=greedy(4))
        return pipeline

    def _warm_batching(self) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = CACHE_GIB, 16, False
        pipeline = openvino_genai.ContinuousBatchingPipeline(self._folder, scheduler, "CPU", self._properties)
        pipeline.generate(["hi"], images=[[blank()]], generation_config=[greedy(4)])
        return pipeline


def greedy(num_tokens: int) -> Any:
    """Return the settings of an answer of *num_tokens*."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos, config.do_sample = True, False
    return config


def tensor(rgb: "np.ndarray[Any, Any]") -> Any:
    """Return an image (height, width, 3) as the pipelines take it."""
    return openvino.Tensor(rgb[None])


def blank() -> Any:
    """Return an image to warm up with."""
    return tensor(np.zeros((448, 448, 3), np.uint8))


def images(png: str | None) -> list[Any]:
    """Decode a request's image, if it has one."""
    return [] if png is None else [tensor(np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")))]


def answer(pipelines: Pipelines, requests: list[dict[str, Any]], num_tokens: int) -> dict[str, float]:
    """Answer *requests* at once and return the times."""
    pipeline = pipelines.pipeline(batches=len(requests) > 1)
    begun = time.perf_counter()
    if len(requests) > 1:
        results = pipeline.generate(
            [request["text"] for request in requests],
            images=[images(request["png"]) for request in requests],
            generation_config=[greedy(num_tokens)] * len(requests),
        )
    else:
        given = {"images": found} if (found := images(requests[0]["png"])) else {}
        results = [pipeline.generate(requests[0]["text"], generation_config=greedy(num_tokens), **given)]
    whole = time.perf_counter() - begun
    metrics = [result.perf_metrics for result in results]
    first = sum(one.get_ttft().mean for one in metrics) / len(metrics) / 1000
    each = sum(one.get_tpot().mean for one in metrics) / len(metrics) / 1000 if num_tokens > 1 else 0.0
    return {"whole": whole, "first": first, "each": each}


def main() -> None:
    """Answer line by line."""
    pipelines = Pipelines(sys.argv[1], int(sys.argv[2]))
    out = sys.stdout
    # The libraries print, too.
    sys.stdout = sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answer(pipelines, question["requests"], question["num_tokens"])), file=out, flush=True)


if __name__ == "__main__":
    main()
