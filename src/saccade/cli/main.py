"""The `saccade` program: its commands and how an error is shown."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from saccade import config
from saccade.errors import SaccadeError

HELP = """Serve vision-language models.

Every flag of a command may also come from the environment, or from a TOML file: `saccade COMMAND --config FILE`.
"""
EXIT_ERROR = 1
EXIT_USAGE = 2
COMMANDS = {
    "serve": "Serve a model on this machine: one gateway and one worker.",
    "worker": "Serve a model to gateways: the engine and its gRPC front.",
    "gateway": "Serve the OpenAI API over workers that run elsewhere.",
    "demo": "Start the bundled model, ask it about the bundled pictures, and stop.",
    "inspect": "Show what a model will see of pictures.",
}


def make_app(file: Path | None) -> App:
    """Return the program; a command's module is imported only when the command is called. Raises StartupError."""
    app = App(name="saccade", help=HELP, config=config.sources(file))
    for name, summary in COMMANDS.items():
        app.command(f"saccade.cli.{name}:{name}", name=name, help=summary)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run the command that *arguments* name; return the exit code."""
    launcher = App(help_flags=(), version_flags=(), result_action="return_value")

    @launcher.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        config: Annotated[Path | None, Parameter(help="Settings as TOML.")] = None,
    ) -> None:
        make_app(config)(tokens, exit_on_error=False, result_action="return_value")

    try:
        launcher(arguments, exit_on_error=False)
    except SaccadeError as error:
        Console(stderr=True).print(f"saccade: {error.message}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_ERROR
    except CycloptsError:
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_ERROR
    return 0


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
