"""The checks of `saccade doctor` on this machine and on a model's folder. They change nothing and fetch nothing."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

import httpx2
import msgspec

from saccade.cli.screen import shared_memory_problem, size
from saccade.cli.torch_build import CUDA_LIBRARY, installed_torch, unused_cuda
from saccade.engine.gpu_devices import has_gpu
from saccade.engine.installed import has_engine
from saccade.errors import StartupError
from saccade.gateway.admin import HOST as LOOPBACK
from saccade.gateway.app import listen
from saccade.gateway.config import ConnectionLimits, MediaSettings
from saccade.gateway.confinement import MEASURES, environment
from saccade.gateway.served_models.model_probe import ModelProbe
from saccade.gateway.server.connections import OTHER_DESCRIPTORS
from saccade.models import family_of
from saccade.models.files import parse_json, read_model_files
from saccade.protocol.model_files import CONFIG

State = Literal["ok", "warning", "failed"]
DRIVERS = {12: 525, 13: 580}
"""The oldest NVIDIA driver for each major version of CUDA."""

COLUMNS = "index,name,driver_version,memory.used,memory.total"
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits")
FIRST_START = (
    "libraries compile kernels, in CPU seconds as measured without a GPU: about 660 for each of two modules of "
    "FlashInfer's attention, on Hopper 1.5 for each of about 40 products in FP8 blocks, and 15,000 for experts in FP8 "
    "blocks. Later starts find them. `saccade compile MODEL` compiles ahead"
)
USED_SHARE = 0.05  # of a GPU's memory: more than a driver and a desktop take
CONFINE = "from saccade.gateway.confinement import confine; print(*confine(1 << 30))"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check: *detail* states a fact, and *fix* says what to do if *state* is not ok."""

    name: str
    state: State
    detail: str
    fix: str = ""


def check_machine(port: int) -> Iterator[Finding]:
    """Yield findings about this machine as a server's host; a gateway would listen on *port*."""
    torch, with_gpu = installed_torch(), has_gpu()
    yield check_torch(torch, with_gpu)
    if with_gpu:
        yield from check_gpus(_output(*NVIDIA_SMI), " ".join((torch and torch.requires) or ()))
        yield Finding("first start", "ok", FIRST_START)
    problem = shared_memory_problem(MediaSettings().shared_memory_bytes)
    yield Finding("shared memory", "warning" if problem else "ok", problem or "there is room for pixels")
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield check_port(port)
    yield check_confinement(_output(sys.executable, "-c", CONFINE).split())


def _output(*command: str) -> str:
    """Return what *command* prints; "" if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60.0, env=environment(os.environ), check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def check_torch(torch: Distribution | None, with_gpu: bool) -> Finding:
    """Return whether the build of *torch* fits the machine."""
    fix = 'README.md, "Install", names the build to install.'
    if torch is None:
        detail = "it is not installed: this machine can run gateways, but no models"
        return Finding("torch", "ok", detail)
    if sentence := unused_cuda(torch):
        return Finding("torch", "warning", sentence)
    has_cuda = Path(str(torch.locate_file(CUDA_LIBRARY))).exists()
    if with_gpu and not has_cuda:
        return Finding("torch", "warning", f"{torch.version} is a build for the CPU, and there is an NVIDIA GPU", fix)
    return Finding("torch", "ok", f"{torch.version}, for {'NVIDIA GPUs' if has_cuda else 'the CPU'}")


def check_gpus(listing: str, requirements: str) -> Iterator[Finding]:
    """Yield a finding for each GPU in *listing*, the output of NVIDIA_SMI.

    torch's *requirements* tell its CUDA version.
    """
    cuda = re.search(r"nvidia-[\w-]+-cu(\d+)", requirements)
    oldest = DRIVERS.get(int(cuda[1]) if cuda else 0, 0)
    rows = re.findall(r"^(\d+), (.+), ((\d+)[\d.]*), (\d+), (\d+)$", listing, re.MULTILINE)
    if not rows:
        fix = "Install the NVIDIA driver; for containers, NVIDIA's container toolkit on the host."
        yield Finding("GPU", "failed", "nvidia-smi lists none, although the device files are there", fix)
    for index, gpu, driver, major, used, total in rows:
        name, detail = f"GPU {index}", f"{gpu}, {total} MiB, driver {driver}"
        if int(major) < oldest:
            fix = f"Update it to {oldest} or newer, or install a torch for an older CUDA."
            yield Finding(name, "failed", f"{detail}, which is too old for this torch", fix)
        elif int(used) > USED_SHARE * int(total):
            fix = "End them, lower --gpu-memory-utilization, or choose another GPU by CUDA_VISIBLE_DEVICES."
            yield Finding(name, "warning", f"{detail}; programs use {used} MiB of it", fix)
        else:
            yield Finding(name, "ok", detail)


def check_open_files(limit: int) -> Finding:
    """Return whether a gateway may open enough files; *limit* is the hard limit."""
    needed = ConnectionLimits().max_connections + OTHER_DESCRIPTORS
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return Finding("open files", "ok", f"at least {needed} are allowed")
    fix = f"Raise the hard limit to {needed}: `ulimit -Hn`, LimitNOFILE in systemd, ulimits in Docker."
    return Finding("open files", "warning", f"{limit} are allowed, so a gateway takes fewer connections", fix)


def check_port(port: int) -> Finding:
    """Return whether a gateway could listen on *port*, or whether one answers there already."""
    try:
        listen(LOOPBACK, port).close()
    except StartupError as error:
        try:
            httpx2.get(f"http://{LOOPBACK}:{port}/live", timeout=2.0, trust_env=False).raise_for_status()
        except httpx2.HTTPError:
            return Finding("port", "failed", error.message)
        return Finding("port", "ok", f"a server answers at port {port}")
    return Finding("port", "ok", f"{port} is free")


def check_confinement(measures: list[str]) -> Finding:
    """Return whether decode processes are confined by all of MEASURES."""
    if missing := [measure for measure in MEASURES if measure not in measures]:
        fix = "Use Linux 5.13 or newer with Landlock, and a container runtime that allows its calls and prctl."
        return Finding("decode processes", "warning", f"they are not confined by {', '.join(missing)}", fix)
    return Finding("decode processes", "ok", f"they are confined by {', '.join(measures)}")


def check_model(folder: Path) -> Finding:
    """Return whether the files in *folder* can be served: configuration, tokenizer, template, weight headers."""
    try:
        files = read_model_files(folder)
        family = family_of(parse_json(files, CONFIG))
        ModelProbe(folder.name, files).run_child()
        weights = _weights(folder) if has_engine() else "weights are not checked without the engine"
    except StartupError as error:
        return Finding("model", "failed", error.message)
    return Finding("model", "ok", f"{family}, {weights}")


def _weights(folder: Path) -> str:
    """Return the size of the weights in *folder*. Raises StartupError."""
    from saccade.engine.executor.weight_files import open_checkpoint  # it imports torch, which takes seconds

    with open_checkpoint(folder) as checkpoint:
        return f"{size(sum(tensor.num_bytes for tensor in checkpoint.tensors.values()))} of weights"
