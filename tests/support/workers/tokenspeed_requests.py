"""Messages as an SMG gateway sends them to a worker, for a model's files."""

import math
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fronts import DESCRIPTION
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade import models
from saccade.models.family import Layout
from saccade.models.files import image_processor, parse_json, read_model_files
from saccade.protocol.description import Description
from saccade.protocol.media import NUMPY_DTYPE, ImageLayout
from saccade.transport.shared_memory import FOLDER
from saccade.worker.tokenspeed.model import WireModel

BEFORE, AFTER = [5, 6], [7]


@dataclass(frozen=True)
class Model:
    """The files of a release in *folder*, of the family *name*."""

    folder: Path
    name: str

    @cached_property
    def description(self) -> Description:
        return msgspec.structs.replace(
            DESCRIPTION,
            files=read_model_files(self.folder),
            max_model_len=4096,
            max_num_seqs=8,
            num_blocks=64,
            version="9",
        )

    @cached_property
    def wire(self) -> WireModel:
        return WireModel.of_description(self.description)

    @cached_property
    def layout(self) -> Layout:
        files = self.description.files
        family = models.families()[self.name]
        return models.load_layout(self.name)(parse_json(files, "config.json"), image_processor(files, family))

    def prepared(self, seed: int, dtype: str) -> tuple[ImageLayout, npt.NDArray[Any]]:
        """A random image of 256 x 320 pixels, which no family resizes, as patches of *dtype*."""
        rng = np.random.default_rng(seed)
        # Not every value is equally likely at every place, but all 256 are there.
        image = rng.integers(0, 256, (256, 320, 3), np.uint8)
        layout = self.layout.image(320, 256, self.layout.settings)
        if dtype != "uint8":
            layout = self.layout.external(layout, dtype)
        patches = np.empty(layout.pixel_shape, NUMPY_DTYPE[dtype])
        models.load_pixels(self.name)(self.layout.settings).write_pixels(image, layout, patches)
        return layout, patches

    def item(self, seed: int = 0, start: int = len(BEFORE), dtype: str = "", **fields: Any) -> pb.MultimodalItem:
        """The message of image *seed*, whose tokens begin at *start*."""
        layout, patches = self.prepared(seed, dtype or self.wire.pixel_dtype)
        grid_name = models.families()[self.name].external_grid
        described: dict[str, Any] = {
            "modality": common_pb2.IMAGE,
            "content_hash": bytes([seed]) * 32,
            "encoder_input": tensor(patches, layout.pixel_dtype),
            "model_specific_tensors": {
                str(grid_name): tensor(np.array([layout.grid], np.int64)),
                "patches_per_image": tensor(np.array([math.prod(layout.grid)], np.int64)),
            },
            "placeholders": [pb.PlaceholderRange(offset=start, length=layout.num_tokens)],
            "placeholder_token_id": self.placeholder,
        }
        return pb.MultimodalItem(**(described | fields))

    @property
    def placeholder(self) -> int:
        return self.wire.spec.placeholder_of["image"]

    def message(self, *items: pb.MultimodalItem, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A request with *items*, one after another."""
        num_tokens = sum(place.length for item in items for place in item.placeholders)
        token_ids = [*BEFORE, *[self.placeholder] * num_tokens, *AFTER]
        described: dict[str, Any] = {
            "request_id": "r1",
            "tokenized": pb.TokenizedInput(input_ids=token_ids),
            "sampling_params": pb.SamplingParams(**({"max_new_tokens": 10, "temperature": 0.0} | (sampling or {}))),
            "mm_inputs": pb.MultimodalInputs(items=items) if items else None,
        }
        return pb.GenerateRequest(**(described | fields))


def tensor(values: npt.NDArray[Any], dtype: str = "int64") -> pb.TensorData:
    return pb.TensorData(shape=values.shape, dtype=dtype, inline=values.tobytes())


def in_file(given: pb.TensorData, name: str = "", **handle: Any) -> pb.TensorData:
    """The same tensor in a file of /dev/shm, as SMG writes it."""
    name = name or f"smg-tokenspeed-{os.getpid()}-{time.monotonic_ns()}-0"
    path = FOLDER / name
    path.touch(mode=0o600)
    path.write_bytes(given.inline)
    described = {"name": name, "offset": 0, "nbytes": len(given.inline), "owner_id": f"smg:{os.getpid()}"}
    return pb.TensorData(shape=given.shape, dtype=given.dtype, shm=common_pb2.ShmHandle(**(described | handle)))
