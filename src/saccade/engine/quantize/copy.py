"""Write a copy of a model's folder with rounded weights, one tensor after the other."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from saccade.engine.executor.loader import choose_dtype, empty_network
from saccade.engine.executor.rounding import ROUNDED
from saccade.engine.executor.tied_head import settle_head
from saccade.engine.executor.weight_files import Checkpoint, open_checkpoint
from saccade.engine.executor.weight_filler import Progress
from saccade.engine.executor.weight_formats import KEY, read_quantisation
from saccade.engine.quantize.folders import check_place, check_space, files_beside_weights, new_folder
from saccade.engine.quantize.plan import CopyPlan, plan_copy
from saccade.engine.quantize.section import quantization_config, with_own_head
from saccade.engine.quantize.shards import write_shards
from saccade.errors import StartupError
from saccade.models.files import read_model_files
from saccade.protocol.model_files import CONFIG

STAGE = "rounding weights"


class Copied(NamedTuple):
    """The bytes of the weights before and after, and the number of rounded weights of each format."""

    num_bytes_before: int
    num_bytes: int
    num_rounded: dict[str, int]


def write_rounded_copy(model: Path, target: Path, choice: str, progress: Progress) -> Copied:
    """Write a copy of the folder *model* to *target*, with weights rounded as by --quantization *choice* on a CPU.

    The copy is in the format of compressed-tensors. *target* appears when it is complete; it must not exist, or be
    empty. The process holds one file's tensors at a time, see `write_shards`. *progress* counts the bytes that are
    read. Raises StartupError.
    """
    check_place(model, target)
    parsed, network = empty_network(read_model_files(model))
    if (quantisation := read_quantisation(parsed, model)) is not None:
        raise StartupError(
            f"{model} is already quantised: {quantisation.source} says that its weights are in the format "
            f"{quantisation.formats}. Serve it as it is, or quantise the model that it was made from."
        )
    network.to(choose_dtype("auto", torch.device("cpu"), parsed))
    with open_checkpoint(model) as checkpoint:
        settle_head(network, checkpoint)
        plan = plan_copy(network, checkpoint, choice)
        if not plan.formats:
            raise StartupError(f"{model} has no weight that is large enough to be rounded.")
        others = files_beside_weights(model)
        check_space(target, plan.num_bytes + sum(path.stat().st_size for path in others))
        with new_folder(target) as folder:
            num_bytes = write_shards(folder, _tensors(plan, checkpoint, network.dtype, progress))
            for path in others:
                copy = folder / path.relative_to(model)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            # A folder without this file is no model.
            (folder / CONFIG).write_text(_config(model, plan))
    return Copied(plan.num_bytes_before, num_bytes, plan.counts)


def _tensors(
    plan: CopyPlan, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors that the copy has of each weight, by name. *dtype* is the network's: it rounds first."""
    done = 0
    progress(STAGE, 0, plan.num_bytes_to_read)
    for weight in plan.weights:
        tensor = checkpoint.read(weight.source.name)
        if weight.format is None:
            yield {weight.source.name: tensor.contiguous()}
        else:
            rounded = ROUNDED[weight.format](tensor.to(dtype))
            derived = {end: rule.of(*tensor.shape) for end, rule in rounded.format.derived.items()}
            yield {f"{weight.module}.{end}": field for end, field in {**rounded.fields, **derived}.items()}
        done += weight.source.num_bytes
        progress(STAGE, done, plan.num_bytes_to_read)


def _config(model: Path, plan: CopyPlan) -> str:
    config = json.loads((model / CONFIG).read_bytes())
    # The copy's files have the usual names.
    config.pop("transformers_weights", None)
    if plan.has_own_head:
        config = with_own_head(config)
    config[KEY] = quantization_config(plan.formats, plan.plain_modules)
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
