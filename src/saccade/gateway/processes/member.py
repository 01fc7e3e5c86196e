"""Member: one gateway process of several that share a port."""

from dataclasses import dataclass
from pathlib import Path

INDEXER = "indexer"


@dataclass(frozen=True)
class Member:
    """Process *number* of *size*; the sockets of all are in *folder*, which belongs to their user alone."""

    folder: Path
    number: int
    size: int

    @property
    def indexer(self) -> Path:
        """The indexer's socket."""
        return self.folder / f"{INDEXER}.sock"

    @property
    def own(self) -> Path:
        """This process's socket."""
        return self._socket(self.number)

    @property
    def siblings(self) -> dict[str, Path]:
        """The sockets of the other gateway processes, by name."""
        return {str(number): self._socket(number) for number in range(self.size) if number != self.number}

    def _socket(self, number: int) -> Path:
        return self.folder / f"gateway-{number}.sock"

    def part(self, whole: int) -> int:
        """Return this process's part of a limit that all processes share, rounded up."""
        return -(-whole // self.size)
