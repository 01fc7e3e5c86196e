"""Exit codes of the `saccade` program."""

ERROR = 1
"""A setting, a file or the machine is wrong."""

USAGE = 2
"""The command line is wrong."""

TOLD = (ERROR, USAGE)
"""With these codes the program has printed the error itself, so its parent prints nothing."""

CLOSED_PIPE = 141
"""The reader of the program's output has gone, as `head` does; a shell shows the same code for SIGPIPE."""

DIFFERENT = 1
"""`saccade replay`: a step gave another result than the recording."""

CANNOT_REPLAY = 2
"""`saccade replay`: the recording cannot be replayed here."""
