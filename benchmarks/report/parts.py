"""The parts of the report: each is one program, which takes at most twenty minutes and writes its rows as JSON."""

from dataclasses import dataclass
from pathlib import Path

PART_SECONDS = 20 * 60.0


@dataclass(frozen=True)
class Peers:
    """Where programs of others are: an environment with vLLM, the programs SMG and vllm-router, SMG's libturbojpeg."""

    vllm: Path | None = None
    smg: Path | None = None
    vllm_router: Path | None = None
    turbojpeg: Path | None = None


def flag(name: str) -> str:
    """Return the flag for the field *name* of Peers."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Part:
    """*module* is run with *arguments*, and with those of *peers*, names of fields of Peers.

    *few* are the arguments that make it short, for a trial.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    few: tuple[str, ...] = ()

    def missing(self, peers: Peers) -> list[str]:
        """Return the programs that this part needs and *peers* does not have."""
        return [name for name in self.peers if getattr(peers, name) is None]

    def words(self, peers: Peers, *, is_trial: bool) -> list[str]:
        """Return the words after `python`, without --out."""
        words = ["-m", self.module, *self.arguments, *(self.few if is_trial else ())]
        return words + [word for name in self.peers for word in (flag(name), str(getattr(peers, name)))]


SMG = ("smg", "turbojpeg")
FEW_CLIENTS = ("--clients", "1", "10", "--requests", "10")
TTFT_SYSTEMS = {"Saccade": (), "Saccade before vLLM": ("vllm",), "vLLM": ("vllm",), "SMG before our worker": SMG}
GATEWAY_CASES = ("Qwen3-VL 1280x960", "Qwen3-VL 1920x1080", "text only", "200 image requests", "Kimi-K2.5")
SHORT = ("--scale", "0.1", "--repeats", "1")

PARTS = (
    Part("accuracy", "benchmarks.report.accuracy", few=("--images", "10")),
    *(
        Part(f"ttft: {system}", "benchmarks.report.ttft", ("--system", system), peers, FEW_CLIENTS)
        for system, peers in TTFT_SYSTEMS.items()
    ),
    *(Part(f"gateway: {case}", "benchmarks.gateway", ("--only", case), SMG, SHORT) for case in GATEWAY_CASES),
    Part("streaming", "benchmarks.gateway", ("--only", "streamed answers"), SMG, SHORT),
    Part(
        "routing: four workers",
        "benchmarks.fleet",
        ("--family", "qwen3_vl", "--part", "gate", "round_robin"),
        few=("--images", "16", "--workers", "2", "--part", "gate"),
    ),
    Part(
        "routing: two vLLM", "benchmarks.peers", (), ("vllm", "smg", "vllm_router"), ("--images", "12", "--asks", "2")
    ),
)
