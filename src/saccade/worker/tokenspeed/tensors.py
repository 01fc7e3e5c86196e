"""Reads a tensor's bytes from TokenSpeed's wire: from the message, or from a file in /dev/shm that the reader removes.

The rules for files come from smg_grpc_servicer/mm_shm.py. Here a name must also have SMG's form. Otherwise a message
could make the worker read or remove other files in /dev/shm, such as other gateways' slots.
"""

import math
import os
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from saccade.connectors.smg.shared_memory_links import NAME
from saccade.errors import ImageTooLarge, InvalidValue, UnsupportedParameter
from saccade.transport import shared_memory
from saccade.transport.wire import MAX_MESSAGE_BYTES

NUMPY_DTYPES = {"bfloat16": "<u2", "float32": "<f4", "int64": "<i8", "uint32": "<u4"}
"""The numpy type with the bits of a value, by its name on the wire."""


def read_tensor(tensor: pb.TensorData, field: str) -> npt.NDArray[Any]:
    """Return the values of *tensor*, which is the message's *field*; bfloat16 values come as uint16.

    Raises InvalidValue if the tensor is malformed or its file cannot be read. Raises UnsupportedParameter for dtypes
    and transports that are not served, and ImageTooLarge for a large file.
    """
    if tensor.dtype not in NUMPY_DTYPES:
        served = ", ".join(NUMPY_DTYPES)
        raise UnsupportedParameter(f"{field}.dtype is {tensor.dtype!r}; this worker reads {served}.", field)
    values = np.dtype(NUMPY_DTYPES[tensor.dtype])
    shape = tuple(tensor.shape)
    num_bytes = math.prod(shape) * values.itemsize
    match tensor.WhichOneof("payload"):
        case "inline":
            if len(tensor.inline) != num_bytes:
                raise _wrong_size(field, tensor, num_bytes, len(tensor.inline))
            return np.frombuffer(tensor.inline, values).reshape(shape)
        case "shm":
            if tensor.shm.nbytes != num_bytes:
                raise _wrong_size(field, tensor, num_bytes, tensor.shm.nbytes)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise ImageTooLarge(f"{field} has {num_bytes} bytes; at most {MAX_MESSAGE_BYTES} are read.", field)
            return _read_file(tensor.shm, field).view(values).reshape(shape)
        case "remote":
            raise UnsupportedParameter(f"{field}.remote is not served; send the tensor inline or by shm.", field)
    raise InvalidValue(f"{field} has no payload.", field)


def _wrong_size(field: str, tensor: pb.TensorData, expected: int, got: int) -> InvalidValue:
    return InvalidValue(f"{field} is {tensor.dtype} of shape {list(tensor.shape)}: {expected} bytes, not {got}.", field)


def file_name(handle: common_pb2.ShmHandle) -> str | None:
    """Return the name of the file in /dev/shm; None if it does not have the form of SMG's names."""
    name = str(handle.name).removeprefix("/")
    return name if NAME.fullmatch(name) else None


def files_of(message: pb.GenerateRequest) -> Iterator[str]:
    """Yield the names of all files that *message* hands over."""
    for item in message.mm_inputs.items:
        for tensor in (item.encoder_input, *item.model_specific_tensors.values()):
            if tensor.WhichOneof("payload") == "shm" and (name := file_name(tensor.shm)) is not None:
                yield name


def remove_files(message: pb.GenerateRequest) -> None:
    """Remove the files that *message* hands over. The receiver removes them even if it has not read them."""
    for name in files_of(message):
        shared_memory.unlink(name)


def _read_file(handle: common_pb2.ShmHandle, field: str) -> npt.NDArray[np.uint8]:
    """Return a copy of handle.nbytes bytes from handle.offset on.

    The file is not mapped, because a mapped file that shrinks would end the process.
    """
    name = file_name(handle)
    if name is None:
        raise InvalidValue(f"{field}.shm.name must have the form smg-tokenspeed-PID-TIME-NUMBER.", field)
    try:
        descriptor = os.open(shared_memory.FOLDER / name, os.O_RDONLY | shared_memory.OPEN_FLAGS)
    except OSError as error:
        raise InvalidValue(
            f"{field}.shm: this worker cannot open /dev/shm/{name}. Gateway and worker must share /dev/shm and run as "
            "the same user; else send tensors inline.",
            field,
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidValue(f"{field}.shm is not a regular file.", field)
        if handle.offset + handle.nbytes > status.st_size:
            raise InvalidValue(
                f"{field}.shm has {status.st_size} bytes, not {handle.nbytes} from offset {handle.offset} on.", field
            )
        buffer = np.empty(handle.nbytes, np.uint8)
        num_read = os.preadv(descriptor, [buffer.data], handle.offset) if handle.nbytes else 0
    finally:
        os.close(descriptor)
    if num_read != handle.nbytes:
        raise InvalidValue(f"{field}.shm gave {num_read} of {handle.nbytes} bytes.", field)
    return buffer
