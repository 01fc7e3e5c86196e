"""Kernels' machine code: what Numba made of them once, kept in the user's cache folder, where later processes find it.

Compiling all of them takes from six to twenty seconds, finding them a twentieth of one. Numba can keep code, too, but
as pickles. A file here is a digest, of the file's name and of the object file that follows it: code, and nothing to be
evaluated.
"""

import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import structlog
from llvmlite import binding
from numba import njit, types

from saccade.nn.kernels.compiled import MATH

ENTRY = "saccade_kernel"
ENTRY_CODE = """
declare i32 @"{function}"(ptr, ptr, ptr)
define void @{entry}(ptr %block) {{
  %result = alloca ptr
  %exception = alloca ptr
  %arguments = getelementptr i64, ptr %block, i64 1
  %status = call i32 @"{function}"(ptr %result, ptr %exception, ptr %arguments)
  %good = icmp eq i32 %status, 0
  br i1 %good, label %done, label %failed
failed:
  store i64 1, ptr %block
  br label %done
done:
  ret void
}}
"""
"""A C function around one of Numba's, which wants places for a result and an exception."""

DIGEST_BYTES = 32
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH

Body = Callable[[Any], None]
"""What Numba compiles; it takes the address of arguments."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Code in memory, as long as this lives: *address* is a C function's, void (int64_t *).

    What it is given begins with a place where it writes 1 where it raised something, and the arguments are behind that.
    """

    address: int
    engine: Any


def machine_code(define: Callable[..., Body], parameters: Sequence[object], exact: bool) -> MachineCode:
    """Return the code of the kernel that *define* gives for *parameters*; see `team.kernel` for *exact*.

    Their repr must say all that matters of them. What the kernel calls outside of its file and this package must be
    known to llvmlite.binding.add_symbol.
    """
    folder = _folder()
    if folder is None:
        return _link(_compile(define(*parameters), exact))
    path = folder / f"{define.__name__}-{_digest(define, parameters)}.o"
    code = _read(path)
    if code is None:
        code = _compile(define(*parameters), exact)
        _write(path, code)
    return _link(code)


def _digest(define: Callable[..., Body], parameters: Sequence[object]) -> str:
    name = f"{define.__module__}.{define.__qualname__}{parameters!r}"
    source = hashlib.sha256(Path(define.__code__.co_filename).read_bytes()).hexdigest()
    return hashlib.sha256("\0".join((*_surroundings(), source, name)).encode()).hexdigest()[:32]


@cache
def _surroundings() -> tuple[str, ...]:
    """Return what the code of every kernel depends on: sources, those who compile them, and the processor."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    versions = (platform.python_version(), np.__version__, numba.__version__, llvmlite.__version__)
    features = binding.get_host_cpu_features().flatten()
    return (sources.hexdigest(), *versions, binding.get_process_triple(), binding.get_host_cpu_name(), features)


@cache
def _folder() -> Path | None:
    """Return where code is kept, made where missing; None where there is no place that is the user's own."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "saccade" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        own = _is_own(folder.stat()) and all(_is_safe(parent.stat()) for parent in folder.parents)
    except (OSError, RuntimeError) as error:
        logger.warning("kernels are compiled at each start: there is no folder for them", cause=str(error))
        return None
    if not own:
        logger.warning("kernels are compiled at each start: their folder is not this user's alone", folder=str(folder))
    return folder if own else None


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_MAY_WRITE


def _is_safe(status: os.stat_result) -> bool:
    """Whether no other user but root can put another folder in the place of one that lies in this one."""
    is_closed = not status.st_mode & OTHERS_MAY_WRITE or status.st_mode & stat.S_ISVTX
    return status.st_uid in (0, os.geteuid()) and bool(is_closed)


def _digest_of_file(path: Path, code: bytes) -> bytes:
    """Return what a file begins with. Its name is in it, so that no kernel's code passes for another's."""
    return hashlib.sha256(path.name.encode() + b"\0" + code).digest()


def _read(path: Path) -> bytes | None:
    """Return the code in *path*; None where there is none, or it is not as we wrote it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            content = file.read() if _is_own(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    code = content[DIGEST_BYTES:]
    return code if code and _digest_of_file(path, code) == content[:DIGEST_BYTES] else None


def _write(path: Path, code: bytes) -> None:
    """Keep *code*, whole or not at all; other processes may do the same at this moment."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(_digest_of_file(path, code) + code)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        logger.warning("a kernel could not be kept and will be compiled again", path=str(path), cause=error.strerror)


def _compile(body: Body, exact: bool) -> bytes:
    """Return the object file of *body*, whose entry is ENTRY. Raises TypeError where it needs more than a processor."""
    math = set() if exact else set(MATH)
    options = {"error_model": "numpy", "fastmath": math, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    (text,) = njit(types.void(types.voidptr), **options)(body).inspect_llvm().values()
    module = binding.parse_assembly(text)
    functions = [function for function in module.functions if not function.is_declaration]
    (numba_entry,) = (function.name for function in functions if function.linkage == binding.Linkage.external)
    module.link_in(binding.parse_assembly(ENTRY_CODE.format(entry=ENTRY, function=numba_entry)))
    for function in functions:
        function.linkage = binding.Linkage.internal
    machine = _target_machine()
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
    needed = [function.name for function in module.functions if function.is_declaration]
    refused = [name for name in needed if name.startswith(("NRT_", "Py", "numba_"))]
    if refused:
        raise TypeError(f"The kernel {body.__qualname__} needs memory or the interpreter: {', '.join(refused)}.")
    code: bytes = machine.emit_object(module)
    return code


def _link(code: bytes) -> MachineCode:
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return MachineCode(engine.get_function_address(ENTRY), engine)


def _target_machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, codemodel="jitdefault", jit=True
    )
