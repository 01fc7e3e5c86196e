"""A worker's cache contents, as a snapshot and numbered increments: KV blocks, states and encoded images.

The garbage collector does not track events: a message has about a thousand, and they are never part of a cycle.
"""

from typing import Annotated

import msgspec

Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
"""A key, a hash or a salt. A longer one is not read, so that a count of events bounds their memory."""


class MediaPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a block that shows an image: *length* tokens from the block's position *start*.

    They stand for the image's tokens from *offset* on.
    """

    content_hash: Digest
    start: int
    length: int
    offset: int


class BlockStored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stored"):
    """A full block became reusable."""

    key: Digest
    """16 bytes (saccade.identity.blocks)."""
    parent: Digest
    """The key of the block before it; for a first block, the root's."""
    token_ids: list[int]
    """What the key was computed from, with *media*. Both are empty without --kv-events-token-ids: they are the prompts
    of every tenant, and routing needs keys only."""
    media: list[MediaPlace] = []
    is_first: bool = True
    """Whether *parent* is a root. If it is False, a reader must know *parent* as a stored block. A worker that does not
    know leaves it True."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="removed"):
    """A block left the cache."""

    key: Digest


class BlockOffloaded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="offloaded"):
    """A copy of a block lies in the CPU's memory, from where the worker can load it."""

    key: Digest


class OffloadedRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="offloaded-removed"):
    """The copy of a block left the CPU's memory."""

    key: Digest


class StateStored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="state-stored"):
    """The worker holds what a prompt needs, in addition to its blocks, to resume after block *key*.

    In a model with recurrent layers (Description.resumes_at_states), it is their states after the block; a prompt can
    resume only at such a key. In a model with sliding-window layers (Description.window), it is those layers' block; a
    prompt can resume only if the last window's blocks are held. In both cases the blocks up to the key must be stored
    too.
    """

    key: Digest


class StateRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="state-removed"):
    """The worker has dropped what StateStored reported."""

    key: Digest


# The tags are the first ones: workers and gateways of neighbouring releases must understand each other.
class ImageStored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="picture-stored"):
    """An image's encoder output is held, so that requests with this *salt* need not send its pixels."""

    salt: Digest
    content_hash: Digest


class ImageRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="picture-removed"):
    """An image's encoder output left the cache."""

    salt: Digest
    content_hash: Digest


KvEvent = (
    BlockStored
    | BlockRemoved
    | BlockOffloaded
    | OffloadedRemoved
    | StateStored
    | StateRemoved
    | ImageStored
    | ImageRemoved
)


class KvEvents(msgspec.Struct, frozen=True, array_like=True):
    """One message of the feed. The first is a snapshot, parents before children; each later *number* is one higher.

    A gap in the numbers means that events were lost, so the reader must watch again. A snapshot's messages may share
    one number; *last* is set on the final one.
    """

    number: int
    events: list[KvEvent]
    snapshot: bool = False
    last: bool = True
