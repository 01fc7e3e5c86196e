"""The flags, one frozen dataclass per group. A flag that means the same as one of `vllm serve` has its name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from saccade.engine.config import EngineConfig
from saccade.errors import StartupError
from saccade.gateway.config import GatewayConfig
from saccade.gateway.served_models.tool_call_tokens import Parsers, ReasoningParser, ToolParser
from saccade.gateway.server.connection import ConnectionLimits
from saccade.gateway.tenants.api_keys import MAX_BYTES, flag_keys, read_keys_file
from saccade.media.fetch import FetchConfig
from saccade.media.header import MediaLimits
from saccade.watched_file import WatchedFile

DEFAULTS = GatewayConfig()
ENGINE = EngineConfig(model_dir="", model="")
SECRET = ("api_key", "admin_key")
MIB = 1 << 20
GIB = 1 << 30


Count = Annotated[int, Parameter(validator=Number(gte=1))]
Port = Annotated[int, Parameter(validator=Number(gte=1, lte=65535))]
NumMedia = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, Parameter(validator=Number(gt=0))]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Many = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
Names = Annotated[tuple[str, ...], Parameter(negative="", show_default=False, consume_multiple=True)]


def _origins(_: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return origins that are given one by one, or as a JSON list, as in vLLM."""
    # cyclopts splits environment variables at spaces, so a JSON list arrives in pieces.
    written = " ".join(token.value for token in tokens)
    if not written.startswith("["):
        return tuple(token.value for token in tokens)
    try:
        return msgspec.json.decode(written, type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise ValueError('must be an origin such as https://chat.example, or a JSON list of them: ["*"]') from error


Origins = Annotated[tuple[str, ...], Parameter(negative="", show_default=False, converter=_origins)]


class _WrittenLimits(msgspec.Struct, forbid_unknown_fields=True):
    """Limits as vLLM writes them. Audio is not served, so its limit can only be 0."""

    image: NumMedia = DEFAULTS.media_limits.images
    video: NumMedia = DEFAULTS.media_limits.videos
    audio: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0


def _media_limits(_: Any, tokens: list[Token]) -> MediaLimits:
    try:
        limits = msgspec.json.decode(tokens[0].value, type=_WrittenLimits)
    except msgspec.MsgspecError as error:
        raise ValueError(
            'must be JSON such as {"image": 4, "video": 1}: whole numbers of "image" and "video"; other media are '
            "not served"
        ) from error
    return MediaLimits(limits.image, limits.video)


@Parameter(name="*", group=Group("Server", sort_key=1))
@dataclass(frozen=True)
class ServerFlags:
    """Address, access and limits of the HTTP server."""

    host: str = DEFAULTS.host
    "Address to listen on; 0.0.0.0 makes the server reachable from the network."
    port: Port = DEFAULTS.port
    "Port to listen on."
    gateway_processes: Count = 1
    "Processes that share the port, and one more that keeps the index for them; limits are for all together."
    api_key: Many = ()
    "A key for the API; may be given many times. Prefer SACCADE_API_KEY, which `ps` does not show."
    api_keys_file: Path | None = None
    "A TOML file of tenants, their limits and hashed keys, watched while the gateway runs; see `saccade key`."
    allowed_origins: Origins = ()
    "An origin whose web pages may call the API, * for every one; may be given many times, or as a JSON list."
    max_requests: Count = DEFAULTS.max_requests
    "Requests served at a time; more get 429."
    max_body_bytes: Count = DEFAULTS.max_body_bytes
    "The largest request body."
    max_request_memory: Count = DEFAULTS.max_request_memory_bytes
    "Bytes of request bodies and encoded images together; by default an eighth of the machine's memory."
    max_connections: Count = DEFAULTS.connections.max_connections
    "Connections open at a time."
    max_connections_per_address: Count = DEFAULTS.connections.max_per_address
    "Connections open at a time from one address (IPv6: one /64) that have not sent a valid API key."
    trusted_proxies: Many = ()
    "A network of proxies whose X-Forwarded-For is trusted, such as 10.1.0.0/16; may be given many times."
    strict_parameters: Annotated[bool, Parameter(negative="")] = DEFAULTS.strict_parameters
    "Refuse requests with unknown parameters; otherwise a response header and the log name them."
    trust_request_chat_template: Annotated[bool, Parameter(negative="")] = DEFAULTS.trusts_request_templates
    "Let requests bring chat templates, which are programs; each rendering is limited as the model's own is."
    response_store_bytes: Annotated[int, Parameter(validator=Number(gte=0))] = DEFAULTS.response_store_bytes
    "Conversations of /v1/responses to keep for requests that continue them; 0 keeps none."
    file_store_bytes: Annotated[int, Parameter(validator=Number(gte=0))] = DEFAULTS.file_store_bytes
    "Images uploaded to /v1/files to keep in memory; 0 keeps none."
    file_store_seconds: Count = DEFAULTS.file_store_seconds
    "Seconds that an uploaded image is kept at most."
    shutdown_timeout: Annotated[float, Parameter(validator=Number(gte=0))] = DEFAULTS.shutdown_timeout_seconds
    "Seconds that running requests get to finish at shutdown."
    allowed_hosts: Many = ()
    "A Host name that a server without keys accepts, or *.suffix; may be given many times. IP addresses are accepted."
    metrics_without_key: Annotated[bool, Parameter(negative="")] = False
    "Serve /metrics to clients without a key."
    admin_port: Port | None = None
    "A second port, on loopback, to see workers and empty caches; needs --admin-key."
    admin_key: Many = ()
    "A key for the admin port; may be given many times. Prefer SACCADE_ADMIN_KEY, which `ps` does not show."
    tool_call_parser: ToolParser = DEFAULTS.parsers.tool_calls
    "The form of tool calls in answers; auto is what the model's family declares, none leaves calls in the content."
    reasoning_parser: ReasoningParser = DEFAULTS.parsers.reasoning
    "auto, or a name of vLLM's, reads reasoning between `<think>` and `</think>`; none leaves it in the content."

    def __post_init__(self) -> None:
        """Raise StartupError for a malformed key, or a missing or shared admin key."""
        for flag, keys in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if any(key.split() != [key] for key in keys):
                raise StartupError(f"An {flag} is empty or contains a space, so clients cannot send it in a header.")
        if self.admin_port is not None and not self.admin_key:
            raise StartupError("--admin-port needs an --admin-key: pass one, or set SACCADE_ADMIN_KEY.")
        if set(self.admin_key) & set(self.api_key):
            raise StartupError("An --admin-key equals an --api-key; choose an admin key that no API client has.")

    @property
    def keys_path(self) -> Path | None:
        """The path of --api-keys-file, absolute."""
        return None if self.api_keys_file is None else self.api_keys_file.expanduser().absolute()

    def check_keys_file(self) -> None:
        """Raise StartupError where --api-keys-file is wrong, before anything is started."""
        if self.keys_path is not None:
            read_keys_file(WatchedFile(self.keys_path, MAX_BYTES), flag_keys(self.api_key, self.admin_key))


AsJson = Annotated[MediaLimits, Parameter(converter=_media_limits, n_tokens=1, accepts_keys=False)]
DEFAULT_LIMITS = DEFAULTS.media_limits


@Parameter(name="*", group=Group("Images", sort_key=3))
@dataclass(frozen=True)
class MediaFlags:
    """Limits and caches of images."""

    limit_mm_per_prompt: AsJson = DEFAULT_LIMITS
    "Images and videos per request, as JSON; a kind that is left out keeps its default."
    max_image_pixels: Count = DEFAULTS.max_image_pixels
    "Pixels of the largest accepted image."
    decode_processes: Count = DEFAULTS.num_decode_processes
    "Processes that decode images."
    decode_timeout: Seconds = DEFAULTS.decode_timeout_seconds
    "Seconds that decoding one image may take."
    decode_memory_bytes: Count = DEFAULTS.decode_memory_bytes
    "Bytes of memory that one decode process may use beyond its baseline."
    shared_memory_bytes: Count = DEFAULTS.shared_memory_bytes
    "Bytes of all pixel slots in /dev/shm together."
    mm_processor_cache_gb: Annotated[float, Parameter(validator=Number(gte=0))] = DEFAULTS.image_cache_bytes / GIB
    "GiB of prepared images to keep in those slots; 0 keeps none."
    url_cache_bytes: Annotated[int, Parameter(validator=Number(gte=0))] = DEFAULTS.url_cache_bytes
    "Bytes of fetched images to keep, as long as their servers allow; 0 keeps none."
    allowed_media_domains: Many = ()
    "A host that images may be fetched from, or *.suffix; may be given many times. Without any, every public host."
    allowed_media_networks: Many = ()
    "A network of private hosts that images may be fetched from, such as 10.1.0.0/16; may be given many times."
    allowed_local_media_path: Path | None = None
    "A folder whose files clients may name in file: URLs."


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True)
class EngineFlags:
    """Model, limits, memory and device of the engine."""

    served_model_name: Names = ()
    "The model's names in the API; answers have the first. By default a hub id as given, or a folder's last part."
    max_model_len: Count | None = ENGINE.max_model_len
    "Tokens of prompt and answer together; by default the model's own limit."
    max_num_seqs: Count = ENGINE.max_num_seqs
    "Sequences that run at a time."
    max_num_batched_tokens: Count = ENGINE.max_num_batched_tokens
    "Tokens computed in one step; longer prompts are computed in chunks."
    max_num_waiting: Count = ENGINE.max_num_waiting
    "Sequences that wait to run; more get 429."
    gpu_memory_utilization: float = ENGINE.gpu_memory_utilization
    "Part of the GPU's memory to use."
    kv_cache_memory_bytes: Count | None = ENGINE.kv_cache_bytes
    "Size of the KV cache; by default the device's free memory, on a CPU 1 GiB at most."
    block_size: Count = ENGINE.block_size
    "Tokens in a block of the KV cache."
    encoder_cache_bytes: Annotated[int, Parameter(validator=Number(gte=0))] = ENGINE.encoder_cache_bytes
    "Size of the cache of encoded images."
    state_snapshot_bytes: Annotated[int, Parameter(validator=Number(gte=0))] = ENGINE.state_snapshot_bytes
    "Size of the snapshots from which prompts that begin alike resume, for a model with recurrent layers."
    state_snapshot_blocks: Count = ENGINE.state_snapshot_blocks
    "Blocks of the KV cache between two such snapshots; one more is taken at the end of each prompt."
    encode_budget_patches: Count | None = ENGINE.encode_budget_patches
    "Patches that the vision encoder processes in one step; by default 1024 on a CPU, 16384 on a GPU."
    enable_prefix_caching: bool = ENGINE.enable_prefix_caching
    "Reuse the KV cache of prompts that begin alike."
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    "The network's number format; auto is the checkpoint's own, but float32 on a CPU without bfloat16."
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    "Number format of the KV cache; auto is the network's, fp8 is e4m3 with the checkpoint's scales, else 1."
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "Where the network runs; auto takes a GPU if there is one."
    attention_backend: Literal["auto", "torch_sdpa", "triton", "flashinfer"] = "auto"
    "What computes the language model's attention; the summary of the start says why auto took what."
    mm_encoder_attn_backend: Annotated[
        Literal["auto", "torch_sdpa", "triton", "flashinfer_cudnn", "torch_varlen", "amx"],
        Parameter(alias="--mm-attention-backend"),
    ] = "auto"
    "What computes the vision encoder's attention; auto is amx in bfloat16 on a CPU that has AMX, with saccade[cpu]."
    cuda_graphs: bool = ENGINE.cuda_graphs
    "Repeat decode steps as CUDA graphs; needs a GPU and --attention-backend triton. Never run on a GPU yet."
    mm_encoder_cuda_graph: bool = ENGINE.mm_encoder_cuda_graph
    "Repeat the vision encoder as CUDA graphs; the summary of the start says why not. Never run on a GPU yet."
    threads: Count | None = ENGINE.threads
    "CPU threads of the network, in each process; by default OMP_NUM_THREADS, else one less than there are cores."
    tensor_parallel_size: Annotated[Count, Parameter(alias="-tp")] = ENGINE.tensor_parallel_size
    "Processes that compute the model together, each with its part of the weights on a GPU of its own."
    attention_tensor_parallel_size: Annotated[Count | None, Parameter(alias="--attn-tp-size")] = None
    "How many of these processes share the attention and the KV cache, by default all; the others hold copies."
    mm_encoder_tp_mode: Literal["data", "weights"] = "data"
    "How these processes share the vision encoder: data gives each whole images, weights cuts its matrices."
    engine_silence: Seconds = 300.0
    "Seconds that one step may take before the engine counts as hung and is replaced."
    trust_remote_code: Annotated[bool, Parameter(negative="")] = False
    "Accepted and ignored: code that ships with a model is never run."
    record_steps: Path | None = None
    "A folder to record steps in, for `saccade replay`. They hold prompts and answers."
    record_steps_bytes: Annotated[int, Parameter(validator=Number(gte=MIB))] = ENGINE.record_steps_bytes
    "Bytes of recorded steps to keep; the oldest are deleted."
    record_pixels: Annotated[bool, Parameter(negative="")] = ENGINE.record_pixels
    "Record images' pixels too; without them, steps that encode an image cannot be replayed."


def served_names(model: str, folder: Path, flags: EngineFlags) -> tuple[str, ...]:
    """Return the model's names in the API, without duplicates: the flag's, else that of default_name()."""
    return tuple(dict.fromkeys(flags.served_model_name)) or (default_name(model, folder),)


def default_name(model: str, folder: Path) -> str:
    """Return a model's default name: a hub id as given, else the folder's last part."""
    return folder.name if Path(model).expanduser().is_dir() else model


def engine_config(model: str, folder: Path, flags: EngineFlags) -> EngineConfig:
    """Return the settings of an engine. Raises StartupError for settings that cannot work."""
    name, *aliases = served_names(model, folder, flags)
    config = EngineConfig(
        model_dir=str(folder),
        model=name,
        aliases=tuple(aliases),
        device=flags.device,
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_waiting=flags.max_num_waiting,
        block_size=flags.block_size,
        kv_cache_bytes=flags.kv_cache_memory_bytes,
        encoder_cache_bytes=flags.encoder_cache_bytes,
        state_snapshot_bytes=flags.state_snapshot_bytes,
        state_snapshot_blocks=flags.state_snapshot_blocks,
        encode_budget_patches=flags.encode_budget_patches,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        attention_backend=flags.attention_backend,
        mm_encoder_attn_backend=flags.mm_encoder_attn_backend,
        cuda_graphs=flags.cuda_graphs,
        mm_encoder_cuda_graph=flags.mm_encoder_cuda_graph,
        threads=flags.threads,
        tensor_parallel_size=flags.tensor_parallel_size,
        attention_tensor_parallel_size=flags.attention_tensor_parallel_size,
        mm_encoder_tp_mode=flags.mm_encoder_tp_mode,
        enable_prefix_caching=flags.enable_prefix_caching,
        record_steps=None if flags.record_steps is None else str(flags.record_steps.expanduser().absolute()),
        record_steps_bytes=flags.record_steps_bytes,
        record_pixels=flags.record_pixels,
    )
    config.check()
    return config


def gateway_config(server: ServerFlags, media: MediaFlags, worker_urls: tuple[str, ...]) -> GatewayConfig:
    """Return the settings of a gateway."""
    return GatewayConfig(
        host=server.host,
        port=server.port,
        worker_urls=worker_urls,
        api_keys=server.api_key,
        api_keys_file=server.keys_path,
        allowed_origins=server.allowed_origins,
        allowed_hosts=server.allowed_hosts,
        metrics_without_key=server.metrics_without_key,
        admin_port=server.admin_port,
        admin_keys=server.admin_key,
        media_limits=media.limit_mm_per_prompt,
        max_image_pixels=media.max_image_pixels,
        max_requests=server.max_requests,
        max_body_bytes=server.max_body_bytes,
        max_request_memory_bytes=server.max_request_memory,
        connections=ConnectionLimits(
            max_connections=server.max_connections, max_per_address=server.max_connections_per_address
        ),
        trusted_proxies=server.trusted_proxies,
        strict_parameters=server.strict_parameters,
        response_store_bytes=server.response_store_bytes,
        file_store_bytes=server.file_store_bytes,
        file_store_seconds=server.file_store_seconds,
        trusts_request_templates=server.trust_request_chat_template,
        parsers=Parsers(server.tool_call_parser, server.reasoning_parser),
        shutdown_timeout_seconds=server.shutdown_timeout,
        num_decode_processes=media.decode_processes,
        decode_timeout_seconds=media.decode_timeout,
        decode_memory_bytes=media.decode_memory_bytes,
        shared_memory_bytes=media.shared_memory_bytes,
        image_cache_bytes=int(media.mm_processor_cache_gb * GIB),
        url_cache_bytes=media.url_cache_bytes,
        fetch=FetchConfig(
            allowed_domains=media.allowed_media_domains,
            allowed_networks=media.allowed_media_networks,
            local_root=media.allowed_local_media_path,
        ),
    )


SERVER_FLAGS = ServerFlags()
MEDIA_FLAGS = MediaFlags()
ENGINE_FLAGS = EngineFlags()
"""Every flag at its default."""
