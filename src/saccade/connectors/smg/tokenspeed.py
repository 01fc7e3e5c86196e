"""A TokenSpeed worker as a gateway sees it: `tokenspeed.grpc.scheduler.TokenSpeedScheduler`."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc import TokenSpeedSchedulerStub

from saccade.connectors.events.sent_images import SentImages
from saccade.connectors.smg import model as smg_model
from saccade.connectors.smg.client import SmgClient
from saccade.connectors.smg.session import ClientContext, SmgSession
from saccade.connectors.smg.tokenspeed_messages import generate_request, pad
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import EXACT
from saccade.protocol.request import EngineRequest

SCHEME = "tokenspeed://"

PIXEL_DTYPES = {"": "bfloat16", "bfloat16": "bfloat16"}
"""The wire's dtype for each encoder dtype of a worker; a worker with another one takes float32 and narrows it."""


class TokenSpeedClient(SmgClient):
    """A TokenSpeed worker. Its events name images by pads of the hashes that it was sent, so they can be read."""

    SCHEME = SCHEME
    NAME = "TokenSpeed"
    MESSAGES = pb
    STUB = TokenSpeedSchedulerStub
    KNOWN = EXACT

    def __init__(self, url: str, context: ClientContext) -> None:
        super().__init__(url, context, SentImages(pad))

    def describe(self, info: Any, server: Any, files: ModelFiles) -> Description:
        """Return the worker's description. Raises StartupError if it lacks something."""
        version = f"tokenspeed {server.tokenspeed_version}"
        pixel_dtype = PIXEL_DTYPES.get(info.multimodal_encoder_dtype, "float32")
        return smg_model.describe(info, server, files, version=version, pixel_dtype=pixel_dtype, dtype=info.model_dtype)

    def message(
        self, request: EngineRequest, payloads: Sequence[str | bytes], session: SmgSession
    ) -> pb.GenerateRequest:
        return generate_request(request, payloads, session.traits.grid_name, session.eos_token_ids)
