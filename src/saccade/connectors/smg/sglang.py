"""The client for an SGLang worker, which serves `sglang.grpc.scheduler.SglangScheduler`."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

from saccade.connectors.context import ClientContext
from saccade.connectors.events.sent_images import SentImages
from saccade.connectors.rank_urls import RankedAddresses
from saccade.connectors.smg import model as smg_model
from saccade.connectors.smg.client import SmgClient
from saccade.connectors.smg.session import SmgSession
from saccade.connectors.smg.sglang_address import SCHEME
from saccade.connectors.smg.sglang_messages import generate_request
from saccade.connectors.worker_state import Refusals, not_served
from saccade.errors import StartupError, UnsupportedParameter
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.exactness import Exactness
from saccade.protocol.needs import Need
from saccade.protocol.request import EngineRequest

TEXT_PREFIX = Exactness(
    "TEXT_PREFIX",
    "SGLang's events name images by hashes of their float values, which its gRPC call does not take",
)
BIGRAMS = "with speculative decoding of this kind its blocks depend on the token after them"
BIGRAM_ALGORITHMS = ("EAGLE", "NEXTN", "FROZEN_KV_MTP")
BOOTSTRAP_PORT = 8998
"""SGLang's default."""

# SGLang's servicer computes no positions. Without them such a request would end the engine's scheduler.
NO_POSITIONS = UnsupportedParameter(
    "Images for this model are not served by its workers: SGLang's gRPC call lacks the positions that the model needs "
    "with them.",
    "messages",
)

BOTH, PREFILL, DECODE = "null", "prefill", "decode"
"""`--disaggregation-mode` of a worker."""


class SglangClient(SmgClient):
    """The client for an SGLang worker, which must run in *mode*. Images travel inline: it takes no shared memory."""

    ADDRESSES = RankedAddresses("SGLang", SCHEME)
    MESSAGES = pb
    STUB = SglangSchedulerStub
    KNOWN = TEXT_PREFIX

    def __init__(self, url: str, context: ClientContext, mode: str = BOTH) -> None:
        super().__init__(url, context, SentImages())
        self.bootstrap_port = BOOTSTRAP_PORT
        self._mode = mode
        self._salt: bytes | None = None

    def describe(self, info: Any, server: Any, files: ModelFiles) -> Description:
        """Return the worker's description. Raises StartupError if it is incomplete, or if the mode is another."""
        arguments = server.server_args.fields
        mode = arguments["disaggregation_mode"].string_value or BOTH
        if mode != self._mode:
            raise StartupError(
                f"The worker runs with --disaggregation-mode {mode}, not {self._mode}. A prefill and a decode worker "
                f"have one --worker-url: {SCHEME}DECODE_HOST:PORT?prefill=PREFILL_HOST:PORT."
            )
        self.bootstrap_port = smg_model.count(arguments, "disaggregation_bootstrap_port") or BOOTSTRAP_PORT
        version, dtype = f"sglang {server.sglang_version}", arguments["dtype"].string_value
        return smg_model.describe(info, server, files, version=version, pixel_dtype="float32", dtype=dtype)

    def message(self, request: EngineRequest, payloads: Sequence[Any], session: SmgSession) -> pb.GenerateRequest:
        return generate_request(request, payloads, session.traits.grid_name, session.eos_token_ids)

    def refusals(self, session: SmgSession) -> Refusals:
        """Return what this wire lacks. It takes images of models whose positions do not follow from grids."""
        images = {} if session.traits.plain_positions else {Need.IMAGES: NO_POSITIONS}
        return {Need.SEED: not_served("seed"), **images, **super().refusals(session)}

    @property
    def salt(self) -> bytes | None:
        """The first tenant's: the worker cannot keep the caches of several apart."""
        return self._salt

    def begin(self, request: EngineRequest) -> None:
        """Note the tenant: from now on this worker serves no other one."""
        if self._salt is None:
            self._salt = request.salt
            self.context.on_change(self)

    def unknowable(self, server: Any) -> str:
        """Return why the worker's events cannot be read, or "" if they can."""
        algorithm = server.server_args.fields["speculative_algorithm"].string_value
        return super().unknowable(server) or (BIGRAMS if algorithm.upper().startswith(BIGRAM_ALGORITHMS) else "")
