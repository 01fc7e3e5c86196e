"""Translates an EngineRequest to SGLang's GenerateRequest.

The contract is sglang_scheduler.proto of smg-grpc-proto, and what smg_grpc_servicer/sglang/servicer.py makes of it. All
images of a request are concatenated to one float32 tensor, with one grid for each image. The spans of all images are in
order. The engine hashes that tensor itself, and keeps the grids on the CPU.
"""

from collections.abc import Collection, Sequence

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from saccade.connectors.smg.request import int64_bytes, sampling_fields
from saccade.errors import InternalError
from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest

NO_INPUT_LOGPROBS = -1
"""Sent explicitly, because 0, the default of the wire, requests those of the whole prompt."""


def generate_request(
    request: EngineRequest, payloads: Sequence[bytes], grid_name: str | None, eos_token_ids: Collection[int]
) -> pb.GenerateRequest:
    """Return *request* as SGLang's message.

    *payloads* are the pixels of each image. *grid_name* is the model's name for an image's grid; *eos_token_ids* are
    the ids at which the worker stops without being asked.
    """
    sampling = request.sampling
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.token_ids),
        sampling_params=pb.SamplingParams(**sampling_fields(sampling, eos_token_ids)),
        return_logprob=sampling.num_logprobs is not None,
        logprob_start_len=NO_INPUT_LOGPROBS,
        top_logprobs_num=sampling.num_logprobs or 0,
        stream=True,
    )
    if request.media:
        # Filled in place: copying one message into another would copy its pixels too.
        _fill(message.mm_inputs, request.media, payloads, grid_name)
        message.mm_inputs.im_token_id = request.token_ids[request.media[0].spans[0].start]
    return message


def _fill(
    message: pb.MultimodalInputs, media: Sequence[MediaItem], payloads: Sequence[bytes], grid_name: str | None
) -> None:
    (width, *others) = {item.pixel_shape[1:] for item in media}
    if others:
        raise InternalError("The images' patches have different shapes; this worker takes them as one tensor.")
    pixels = message.pixel_values
    pixels.dtype = "float32"
    pixels.shape.extend((sum(item.pixel_shape[0] for item in media), *width))
    pixels.data = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    for start, length in sorted((span.start, span.length) for item in media for span in item.spans):
        message.mm_placeholders.add(offset=start, length=length)
    if grid_name is not None:
        grids = message.model_specific_tensors[grid_name]
        grids.dtype = "int64"
        grids.shape.extend((len(media), len(media[0].grid)))
        grids.data = int64_bytes(number for item in media for number in item.grid)
