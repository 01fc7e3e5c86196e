"""Reads what a worker with one of SMG's scheduler wires reports about itself, and its model's files from a zip."""

import hashlib
import io
import zipfile
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from smg_grpc_proto.generated import common_pb2

from saccade.connectors.events.event_source import EventSource, event_source
from saccade.errors import StartupError
from saccade.identity.content import files_digest
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.engine_load import Load
from saccade.protocol.model_files import CONFIG, GATEWAY_FILES, MAX_FILES_BYTES

MAX_BUNDLE_BYTES = 64 << 20
MAX_DIRECTORY_BYTES = 1 << 20
END_RECORD_BYTES = 22
ZIP64_LOCATOR_BYTES = 20
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

DEFAULT_ENDPOINT = "tcp://*:5557"
"""The default of both engines."""

MIN_BLOCK_TOKENS = 16
"""A block of ours is one page of the worker's, or as many as come to this: SGLang's pages have one token by default."""


def describe(info: Any, server: Any, files: ModelFiles, *, version: str, pixel_dtype: str, dtype: str) -> Description:
    """Return what GetModelInfo (*info*) and GetServerInfo (*server*) report.

    A worker that does not say how many sequences it computes at a time is taken to compute one. Raises StartupError if
    the model's name or the length of its context is missing.
    """
    name = served_name(info)
    if not name or info.max_context_length <= 0:
        raise StartupError("The worker names neither its model nor the length of its context.")
    arguments = server.server_args.fields
    page_size = page_tokens(server)
    block_size = page_size * -(-MIN_BLOCK_TOKENS // page_size)
    return Description(
        model=name,
        fingerprint=files_digest(files.files),
        files=files,
        max_model_len=info.max_context_length,
        max_num_seqs=count(arguments, "max_num_seqs", "max_running_requests") or 1,
        block_size=block_size,
        num_blocks=server.max_total_num_tokens // block_size,
        dtype=dtype or "unknown",
        device="unknown",
        shm_namespace=server.scheduler_info.fields["shm_namespace_id"].string_value,
        version=version,
        pixel_dtype=pixel_dtype,
    )


def page_tokens(server: Any) -> int:
    """Return how many tokens a page of the worker's KV cache holds. Its events call a page a block."""
    return count(server.server_args.fields, "block_size", "page_size") or 1


def num_ranks(server: Any) -> int:
    """Return how many KV caches the worker has: one for each of its data-parallel ranks."""
    arguments = server.server_args.fields
    return count(arguments, "dp_size", "attn_dp_size") or 1


def served_name(info: Any) -> str:
    """Return the name that GetModelInfo has for the model, or "" if it has none."""
    return str(info.served_model_name or info.model_path.rstrip("/").rpartition("/")[2])


def event_source_of(server: Any, host: str, rank: int | None = None) -> EventSource | None:
    """Return the publisher of a worker on *host*, from its GetServerInfo, or None if that is not certain.

    Its `--kv-events-config` may have an address that means another machine here, so that must be a wildcard or *host*.
    """
    try:
        config = msgspec.json.decode(server.server_args.fields["kv_events_config"].string_value, type=dict[str, Any])
        source = event_source(host, {"endpoint": DEFAULT_ENDPOINT} | config)
    except (msgspec.DecodeError, StartupError):
        return None
    return source.of_rank(rank) if source is not None and rank else source


def load_of(reply: Any, block_size: int, rank: int | None) -> Load:
    """Return the load of *rank* in a reply to GetLoads, or the sum over all ranks."""
    ranks = _of_rank(reply.loads, rank)
    num_tokens = sum(rank.max_total_num_tokens for rank in ranks)
    num_free_tokens = num_tokens - sum(rank.num_used_tokens for rank in ranks)
    return Load(
        num_running=sum(rank.num_running_reqs for rank in ranks),
        num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
        num_blocks=num_tokens // block_size,
        num_free_blocks=max(0, num_free_tokens) // block_size,
    )


def pushed_load_of(record: common_pb2.EngineLoad, num_blocks: int) -> Load:
    """Return the load in *record*, which comes with cache events; *num_blocks* is the size of the worker's cache."""
    return Load(
        num_running=record.running_requests,
        num_waiting=record.waiting_requests,
        num_blocks=num_blocks,
        num_free_blocks=round(num_blocks * max(0.0, 1.0 - record.token_usage)),
    )


def max_running(reply: Any, rank: int | None) -> int:
    """Return how many requests run at a time by a reply to GetLoads, at *rank* or together; 0 if it does not say."""
    return sum(max(0, one.max_running_requests) for one in _of_rank(reply.loads, rank))


def _of_rank(loads: Sequence[Any], rank: int | None) -> Sequence[Any]:
    return loads if rank is None else [one for one in loads if one.dp_rank == rank]


def count(arguments: Any, *names: str) -> int:
    """Return the first of the named numbers that is at least 1, or 0; a Struct holds every number as a float."""
    numbers = (arguments[name].number_value for name in names)
    return next((int(number) for number in numbers if 1 <= number < 1 << 31), 0)


async def receive_bundle(chunks: AsyncIterator[Any]) -> bytes:
    """Return the zip that GetTokenizer streams, checked against the sha256 of its last chunk. Raises StartupError."""
    bundle = bytearray()
    digest = ""
    async for chunk in chunks:
        bundle += chunk.data
        digest = chunk.sha256
        if len(bundle) > MAX_BUNDLE_BYTES:
            raise StartupError(f"The worker's tokenizer files are over {MAX_BUNDLE_BYTES} bytes.")
    if hashlib.sha256(bundle).hexdigest() != digest.lower():
        raise StartupError("The worker's tokenizer files arrived damaged: their sha256 is another.")
    return bytes(bundle)


def unpack_bundle(bundle: bytes) -> ModelFiles:
    """Return those of GATEWAY_FILES that are in the zip. Raises StartupError if it is malformed or too large."""
    _check_directory(bundle)
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            files: dict[str, bytes] = {}
            num_left = MAX_FILES_BYTES
            for member in archive.infolist():
                if member.filename in GATEWAY_FILES:
                    files[member.filename] = _member(archive, member, num_left)
                    num_left -= len(files[member.filename])
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        raise StartupError("The worker's tokenizer files are not a valid zip.") from error
    if CONFIG not in files:
        raise StartupError("The worker's tokenizer files lack config.json.")
    return ModelFiles(files=files)


def _check_directory(bundle: bytes) -> None:
    """Limit the number of entries before a library lists them (APPNOTE.TXT 4.3.16: the last record, no comment)."""
    end = bundle[-END_RECORD_BYTES:]
    plain = end.startswith(b"PK\x05\x06") and end.endswith(b"\x00\x00")
    locator = bundle[-END_RECORD_BYTES - ZIP64_LOCATOR_BYTES : -END_RECORD_BYTES]
    if not plain or locator.startswith(b"PK\x06\x07"):
        raise StartupError("The worker's tokenizer files are not a plain zip.")
    if int.from_bytes(end[12:16], "little") > MAX_DIRECTORY_BYTES:
        raise StartupError("The worker's tokenizer files are too many.")


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most_bytes: int) -> bytes:
    """Return one unpacked file of at most *most_bytes*. The size in the directory is not trusted."""
    if member.compress_type not in METHODS:
        raise zipfile.BadZipFile
    with archive.open(member) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise StartupError(f"The worker's tokenizer files unpack to over {MAX_FILES_BYTES} bytes.")
    return content
