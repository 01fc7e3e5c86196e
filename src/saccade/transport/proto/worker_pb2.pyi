from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayFrame(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("without_files",)
    WITHOUT_FILES_FIELD_NUMBER: _ClassVar[int]
    without_files: bool
    def __init__(self, without_files: _Optional[bool] = ...) -> None: ...

class KvEventsRequest(_message.Message):
    __slots__ = ("blocks", "images")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    blocks: bool
    images: bool
    def __init__(self, blocks: _Optional[bool] = ..., images: _Optional[bool] = ...) -> None: ...

class KvEventsFrame(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    def __init__(self, description: _Optional[bytes] = ...) -> None: ...
