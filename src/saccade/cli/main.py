"""The `saccade` program: its commands and how errors are printed."""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, CycloptsPanel, MissingArgumentError, Parameter, UnknownOptionError
from cyclopts.help import DefaultFormatter

from saccade import config
from saccade.cli import exit_codes, vllm_flags
from saccade.cli.help import ALL_FLAGS, ShortHelp
from saccade.consoles import new_console
from saccade.errors import NotInstalled, SaccadeError
from saccade.release import installed_version

HELP = "Serve vision-language models."
EPILOGUE = """`saccade COMMAND --help-all` lists every flag.
`saccade COMMAND --config FILE` reads flags from a TOML file (`port = 8001`) or a YAML one (`port: 8001`).
Environment variables set them too: `SACCADE_PORT=8001`.
A flag overrides the environment, and the environment overrides the file."""
COMMANDS = {
    "ask": "Ask a model about images, from a terminal.",
    "read": "Read documents by a model: PDFs and images to Markdown.",
    "serve": "Serve a model on this machine: one gateway and one worker.",
    "worker": "Serve a model to gateways: the engine and its gRPC front.",
    "gateway": "Serve the OpenAI API over workers that run elsewhere.",
    "fleet": "Run workers on a Ray cluster, and keep a file of their addresses for gateways.",
    "models": "List the models in the hub's cache, and the supported architectures.",
    "pull": "Fetch a model from the hub.",
    "quantize": "Write a copy of a model with weights rounded to int8 or int4, for a CPU.",
    "compile": "Compile ahead, for images, what a model's first start on a GPU compiles.",
    "demo": "Start the bundled model, ask it about the bundled images, and stop.",
    "bench": "Measure a running server, or compare two.",
    "eval": "Measure how right a server's answers are, or compare two.",
    "batch": "Run a file of requests against a server.",
    "key": "Make a key for the file of --api-keys-file.",
    "doctor": "Check this machine, a model's folder, or a running fleet.",
    "inspect": "Show a model's input for images.",
    "top": "Show what happens at a running gateway now, in the terminal.",
    "replay": "Run recorded steps again, and compare the results.",
    "completion": "Print a script that completes commands and flags in a shell.",
}
EXAMPLES = {
    "ask": """`saccade ask cat.jpg "What is this?"`""",
    "serve": "`saccade serve MODEL --max-model-len 32k`",
    "read": "`saccade read report.pdf --pages 3-9 > report.md`",
    "worker": "`saccade worker MODEL --uds /run/saccade/a.sock`",
    "gateway": "`saccade gateway --worker-url unix:/run/saccade/a.sock --worker-url grpc://10.0.0.8:9000`",
    "compile": "`saccade compile MODEL --max-num-seqs 64`",
    "quantize": "`saccade quantize MODEL MODEL-int8`",
    "bench": "`saccade bench http://127.0.0.1:8000 --concurrency 1,8`",
    "eval": "`saccade eval http://127.0.0.1:8000 DocVQA_VAL.tsv --limit 200 --html docvqa.html`",
    "batch": "`saccade batch requests.jsonl --url http://127.0.0.1:8000`",
    "key": "`saccade key new --tenant acme >> keys.toml`",
    "doctor": "`saccade doctor MODEL`",
    "fleet": "`saccade fleet apply fleet.yaml`",
    "inspect": "`saccade inspect MODEL cat.jpg`",
    "top": "`saccade top --gateway http://127.0.0.1:8001 --admin-key KEY`",
}
"""A command line for the help of each command."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Errors of a disk or device that takes no more output."""

VLLM_PAGE = "docs/from-vllm.md"
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def make_app(file: Path | None, help_formatter: DefaultFormatter | None = None) -> App:
    """Return the program; a command's module is imported only when the command is called. Raises StartupError."""
    app = App(
        name="saccade",
        help=HELP,
        help_epilogue=EPILOGUE,
        help_flags=("--help", "-h", ALL_FLAGS),
        help_formatter=help_formatter,
        version=installed_version,
        console=new_console(markup=True),
        suppress_keyboard_interrupt=False,
        config=config.sources(file, _translated),
    )
    for name, summary in COMMANDS.items():
        example = EXAMPLES.get(name)
        app.command(f"saccade.cli.{name}:{name}", name=name, help=f"{summary}\n\n{example}" if example else summary)
    return app


def _translated(name: str, value: object) -> dict[str, object]:
    settings = vllm_flags.translate_setting(name, value)
    if settings is None:
        _say(f"accepted without effect: {name} ({VLLM_PAGE} says why).")
    return settings or {}


def _show_usage_error(error: CycloptsError) -> None:
    """Print the error; for a flag of vLLM print its explanation, not a flag with a similar name."""
    if isinstance(error, UnknownOptionError):
        name = (
            (error.token.keyword or error.token.value).partition("=")[0].strip("[]")
        )  # a name from a file is in brackets
        if sentence := vllm_flags.explanation(name):
            _say(f"{sentence} See {VLLM_PAGE}.")
            return
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        command = " ".join(("saccade", *(error.command_chain or ())))
        _say(f"`{command}` needs {error.argument.name}: `{command} --help` says what it is.")
        return
    new_console(stderr=True).print(CycloptsPanel(error))


def run(arguments: Sequence[str]) -> int:
    """Run the command that *arguments* name; return the exit code."""
    launcher = App(help_flags=(), version_flags=(), result_action="return_value", suppress_keyboard_interrupt=False)

    @launcher.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        config: Annotated[Path | None, Parameter(help="Settings as TOML or YAML.")] = None,
    ) -> int | None:
        is_short = ALL_FLAGS not in tokens and not vllm_flags.COMMANDS.isdisjoint(tokens[:1])
        app = make_app(config, ShortHelp() if is_short else None)
        split = vllm_flags.translate(tokens)
        if split.without_effect:
            _say(f"accepted without effect: {', '.join(split.without_effect)} ({VLLM_PAGE} says why).")
        words = vllm_flags.fold_keys(split.arguments)
        code: int | None = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        return code

    try:
        return launcher(arguments, exit_on_error=False, print_error=False) or 0
    except SaccadeError as error:
        _say(error.message)
        return exit_codes.USAGE if isinstance(error, NotInstalled) else exit_codes.ERROR
    except CycloptsError as error:
        _show_usage_error(error)
        return exit_codes.USAGE
    except KeyboardInterrupt as interrupt:
        _say(str(interrupt) or "Interrupted.")
        return exit_codes.INTERRUPTED


def _say(sentence: str) -> None:
    new_console(stderr=True, soft_wrap=True).print(f"saccade: {sentence}")


def main() -> None:
    """Run the console script."""
    # gRPC's fork handlers are for children that use gRPC. Saccade's children immediately execute another program, so
    # the handlers would only print a warning at every start. gRPC reads this variable at its first use.
    os.environ.setdefault(FORK_SUPPORT, "0")
    # By default it also prints a line for each connection that a server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        code = _end_of_pipe()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _say(f"Cannot write the output: {error.strerror}.")
        code = _end_of_pipe(exit_codes.ERROR)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # what rich makes of one
            raise
        code = _end_of_pipe()
    sys.exit(code)


def _end_of_pipe(code: int = exit_codes.CLOSED_PIPE) -> int:
    """Discard the rest of the output, which cannot be written; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    main()
