"""Help in two sizes: the flags that most people use, and all of them."""

from cyclopts.help import DefaultFormatter, HelpPanel
from rich.console import Console, ConsoleOptions

ALL_FLAGS = "--help-all"
COMMON = frozenset({
    "--model", "--log-level", "--host", "--port", "--uds", "--ssl-certfile", "--ssl-keyfile", "--api-key",
    "--chat-template", "--gateway-processes", "--served-model-name", "--max-model-len", "--max-num-seqs",
    "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--dtype", "--device", "--tensor-parallel-size",
    "--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path", "--worker-url", "--workers-file",
    "--routing-policy", "--role", "--worker-token-file",
})  # fmt: skip
"""The flags of serve, worker and gateway that their short help shows."""


class ShortHelp(DefaultFormatter):
    """Shows COMMON flags only, without their environment variables."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print the COMMON flags of *panel*, if it has any."""
        entries = [entry.copy(env_var=None) for entry in panel.entries if COMMON & set(entry.names)]
        if entries:
            super().__call__(console, options, panel.copy(entries=entries))
