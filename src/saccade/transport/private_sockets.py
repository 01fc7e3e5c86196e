"""Unix sockets that only chosen users can reach: where they may be, their mode, and a peer's uid.

A socket has mode 0600 from the moment it exists. If the operator allows users in addition to the owner, the socket's
access control list names them. So the kernel refuses everyone else, even at gRPC's socket, although gRPC does not
report a peer's uid.
"""

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from saccade.errors import StartupError

MAX_PATH_BYTES = 100
"""The kernel takes 107; `.stream` is added to the path."""

NAME = "worker.sock"
WRITABLE_BY_GROUP, WRITABLE_BY_OTHERS = stat.S_IWGRP, stat.S_IWOTH

_CREDENTIALS = struct.Struct("3i")
_LIST_NAME = "system.posix_acl_access"
_LIST_VERSION = struct.pack("<I", 2)
_LIST_ENTRY = struct.Struct("<HHI")
_READ_WRITE, _NOTHING, _NO_ID = 6, 0, 0xFFFFFFFF
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20

logger = logging.getLogger(__name__)


def default_path() -> Path:
    """Return where a worker listens without --uds, --host and --port. Raises StartupError if its folder is not safe.

    The folder is $XDG_RUNTIME_DIR/saccade, or saccade-UID in the folder for temporary files; it is made with mode 0700.
    """
    folder = _default_folder()
    _make(folder, 0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise StartupError(
            f"The worker's socket would lie in {folder}, which is not a folder of this user with mode 0700. "
            "Remove it, or name a socket with --uds."
        )
    return folder / NAME


def _default_folder() -> Path:
    """Return the folder for this user's sockets.

    It ignores another user's $XDG_RUNTIME_DIR, which sudo may leave set.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.geteuid():
        return runtime / "saccade"
    return Path(tempfile.gettempdir()) / f"saccade-{os.geteuid()}"


def prepare_folder(path: Path, allowed_uids: Collection[int]) -> None:
    """Make the folder for the socket at *path* if it is missing, and check that it is safe.

    Raises StartupError if *path* is too long, if any user could replace the socket, or if a process listens there.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise StartupError(f"The path of a socket takes at most {MAX_PATH_BYTES} bytes; {path} is longer.")
    folder = Path(os.path.realpath(path.parent))
    _make(folder, 0o711 if allowed_uids else 0o700)
    _check_folder(folder)
    if _answers(path):
        raise StartupError(f"Cannot listen on unix:{path}: another process listens there.")


def _make(folder: Path, mode: int) -> None:
    """Create *folder* unless it exists."""
    try:
        folder.mkdir(mode=0o700)
        folder.chmod(mode)
    except FileExistsError:
        pass
    except OSError as error:
        raise StartupError(f"The folder {folder} of the socket cannot be made: {error.strerror}.") from error


def _check_folder(folder: Path) -> None:
    """Raise StartupError if *folder* belongs to another user, or if any user could replace the socket in it.

    Warn if other users may write to *folder*, or could replace it.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise StartupError(
            f"The folder {folder} of the socket belongs to uid {status.st_uid}, which could replace it. "
            "Use a folder of the user that runs this server."
        )
    if status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise StartupError(
            f"Every user may write to {folder}, the folder of the socket, and so replace the socket. Name a "
            f"folder in it that does not exist yet (it is made with mode 0700), or run: chmod o-w {folder}"
        )
    writable = WRITABLE_BY_GROUP | WRITABLE_BY_OTHERS
    if status.st_mode & writable:
        logger.warning("other users may write to %s: one could listen there in place of a stopped server", folder)
    for above in folder.parents:
        state = above.stat()
        if state.st_uid not in (os.geteuid(), 0) or (state.st_mode & writable and not state.st_mode & stat.S_ISVTX):
            logger.warning("other users may write to %s: one could replace the folder of the socket", above)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Create sockets in the block with mode 0600 from the beginning. The block must not await or create other files."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def bound(path: Path, uids: Collection[int]) -> socket.socket:
    """Return a socket that is bound to *path* for its owner and *uids*, and does not listen yet.

    Raises OSError if the path is not available, and StartupError if *uids* cannot be admitted.
    """
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX))
        with owner_only():
            listener.bind(str(path))
        admit(path, uids)
        undo.pop_all()
    return listener


def admit(path: Path, uids: Collection[int]) -> None:
    """Let the kernel admit *uids* to the socket at *path*, in addition to its owner and root. Raises StartupError."""
    if not uids:
        return
    users = [(_USER, _READ_WRITE, uid) for uid in sorted(set(uids))]
    entries = [(_OWNER, _READ_WRITE, _NO_ID), *users, (_GROUP, _NOTHING, _NO_ID)]
    entries += [(_MASK, _READ_WRITE, _NO_ID), (_OTHERS, _NOTHING, _NO_ID)]
    try:
        os.setxattr(path, _LIST_NAME, _LIST_VERSION + b"".join(_LIST_ENTRY.pack(*entry) for entry in entries))
    except OSError as error:
        cause = "has no access control lists" if error.errno == errno.ENOTSUP else f"refuses it: {error.strerror}"
        raise StartupError(
            f"--allowed-uids cannot be set at {path}: its file system {cause}. Run gateway and worker as one user, or "
            "use --host and --port with --worker-token-file."
        ) from error


def peer_uid(connected: socket.socket) -> int:
    """Return the uid of the process that connected to a Unix socket, as the kernel recorded it on connection."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
