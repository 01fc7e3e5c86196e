"""Translates an EngineRequest to TokenSpeed's GenerateRequest, and computes the pads for images in its events.

The contract is tokenspeed_scheduler.proto of smg-grpc-proto, and what smg_grpc_servicer/tokenspeed/servicer.py makes
of it.
"""

import math
import os
from collections.abc import Collection, Sequence

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade.connectors.events.sent_images import FIRST_PAD
from saccade.connectors.smg.request import int64_bytes, sampling_fields
from saccade.connectors.smg.shared_memory_links import OFFSET
from saccade.identity.content import content_hash
from saccade.protocol.media import BYTES_PER_VALUE, MediaItem
from saccade.protocol.request import EngineRequest

PATCHES_PER_IMAGE = "patches_per_image"
PADS_PER_MODALITY = 715_494_549
MODALITIES = ("image", "video", "audio")
"""In the order of the ranges of their pads."""


def generate_request(
    request: EngineRequest, payloads: Sequence[str | bytes], grid_name: str | None, eos_token_ids: Collection[int]
) -> pb.GenerateRequest:
    """Return *request* as TokenSpeed's message.

    *payloads* are the pixels of each image, or the name of their file in shared memory. *grid_name* is the model's name
    for an image's grid; *eos_token_ids* are the ids at which the worker stops without being asked.
    """
    sampling = request.sampling
    seed = None if sampling.seed is None else sampling.seed % (1 << 64)
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.token_ids),
        sampling_params=pb.SamplingParams(**sampling_fields(sampling, eos_token_ids), sampling_seed=seed),
        return_logprob=sampling.num_logprobs is not None,
        top_logprobs_num=sampling.num_logprobs or 0,
        stream=True,
    )
    for item, payload in zip(request.media, payloads, strict=True):
        # Filled in place: copying one message into another would copy its pixels too.
        filled = message.mm_inputs.items.add()
        _fill(filled, item, payload)
        filled.content_hash = salted_hash(item, request.salt)
        filled.placeholder_token_id = request.token_ids[item.spans[0].start]
        if grid_name is not None:
            _fill_int64(filled.model_specific_tensors[grid_name], (1, len(item.grid)), item.grid)
    return message


def salted_hash(item: MediaItem, salt: bytes) -> bytes:
    """Return the hash of *item* with *salt* in it: this wire has no salt, and tenants' images must stay apart."""
    return content_hash(item.content_hash, salt) if salt else item.content_hash


def pad(item: MediaItem, salt: bytes) -> int:
    """Return what TokenSpeed writes over *item*'s placeholders: a number from the hash, in its modality's range."""
    number = int.from_bytes(salted_hash(item, salt)[:8], "little") % PADS_PER_MODALITY
    return FIRST_PAD + MODALITIES.index(item.modality) * PADS_PER_MODALITY + number


def _fill(message: pb.MultimodalItem, item: MediaItem, payload: str | bytes) -> None:
    message.modality = common_pb2.Modality.Value(item.modality.upper())
    tensor = message.encoder_input
    tensor.dtype = item.pixel_dtype
    tensor.shape.extend(item.pixel_shape)
    if isinstance(payload, bytes):
        tensor.inline = payload
    else:
        tensor.shm.name = payload
        tensor.shm.offset = OFFSET
        tensor.shm.nbytes = math.prod(item.pixel_shape) * BYTES_PER_VALUE[item.pixel_dtype]
        tensor.shm.owner_id = f"saccade:{os.getpid()}"
    for span in item.spans:
        message.placeholders.add(offset=span.start, length=span.length)
    _fill_int64(message.model_specific_tensors[PATCHES_PER_IMAGE], (1,), (math.prod(item.grid),))


def _fill_int64(tensor: pb.TensorData, shape: tuple[int, ...], values: tuple[int, ...]) -> None:
    tensor.dtype = "int64"
    tensor.shape.extend(shape)
    tensor.inline = int64_bytes(values)
