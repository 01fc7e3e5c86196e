"""The client for a TokenSpeed worker, which serves `tokenspeed.grpc.scheduler.TokenSpeedScheduler`.

The worker's `dp_size` is how many data-parallel ranks a request can name (smg_grpc_servicer/tokenspeed/servicer.py).
"""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

from saccade.connectors.context import ClientContext
from saccade.connectors.events.sent_images import SentImages
from saccade.connectors.rank_urls import RankedAddresses
from saccade.connectors.smg import model as smg_model
from saccade.connectors.smg.client import SmgClient
from saccade.connectors.smg.session import SmgSession
from saccade.connectors.smg.tokenspeed_messages import generate_request, pad
from saccade.errors import StartupError
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import EXACT
from saccade.protocol.request import EngineRequest

ADDRESSES = RankedAddresses("TokenSpeed", "tokenspeed://")

PIXEL_DTYPES = {"": "bfloat16", "bfloat16": "bfloat16"}
"""The wire's dtype for each encoder dtype of a worker; a worker with another one takes float32 and narrows it."""


class TokenSpeedClient(SmgClient):
    """The client for a TokenSpeed worker. Its events name images by pads made from the hashes that the client sends."""

    ADDRESSES = ADDRESSES
    MESSAGES = pb
    STUB = TokenSpeedSchedulerStub
    KNOWN = EXACT

    def __init__(self, url: str, context: ClientContext) -> None:
        super().__init__(url, context, SentImages(pad))

    def describe(self, info: Any, server: Any, files: ModelFiles) -> Description:
        """Return the worker's description. Raises StartupError if it is incomplete, or if there is no such rank."""
        if self.rank is not None and self.rank >= smg_model.count(server.server_args.fields, "dp_size"):
            raise StartupError(f"The worker has no data-parallel rank {self.rank}, or its requests cannot name ranks.")
        version = f"tokenspeed {server.tokenspeed_version}"
        pixel_dtype = PIXEL_DTYPES.get(info.multimodal_encoder_dtype, "float32")
        return smg_model.describe(info, server, files, version=version, pixel_dtype=pixel_dtype, dtype=info.model_dtype)

    def message(
        self, request: EngineRequest, payloads: Sequence[str | bytes], session: SmgSession
    ) -> pb.GenerateRequest:
        message = generate_request(request, payloads, session.traits.grid_name, session.eos_token_ids)
        if self.rank is not None:
            message.data_parallel_rank = self.rank
        return message

    def unknowable(self, server: Any) -> str:
        """Return why the worker's events cannot be read; "" if they can."""
        reason, num_named = super().unknowable(server), smg_model.count(server.server_args.fields, "dp_size")
        return f"{reason}: add ?ranks={num_named} to its address" if reason and num_named else reason
