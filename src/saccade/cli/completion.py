"""`saccade completion`: a script that completes commands and flags in a shell."""

import os
from pathlib import Path
from typing import Literal, get_args

from saccade.errors import StartupError

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Shell | None = None) -> None:
    """Print a script that completes commands and flags in a shell.

    bash: `source <(saccade completion bash)` in ~/.bashrc; zsh: the same in ~/.zshrc after `compinit`;
    fish: `saccade completion fish > ~/.config/fish/completions/saccade.fish`.

    Parameters
    ----------
    shell
        The shell; by default the one in $SHELL.
    """
    from saccade.cli.main import make_app

    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in get_args(Shell):
        raise StartupError(f"Name the shell: `saccade completion {'|'.join(get_args(Shell))}`.")
    print(make_app(None).generate_completion(shell=name))  # type: ignore[arg-type]
