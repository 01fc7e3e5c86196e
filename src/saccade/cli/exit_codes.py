"""Exit codes of the `saccade` program."""

ERROR = 1
"""A setting, a file or the machine is wrong."""

USAGE = 2
"""The command line is wrong, or names a command whose extra is not installed."""

WITH_MESSAGE = (ERROR, USAGE)
"""The program has printed the error itself, so its parent prints nothing."""

INTERRUPTED = 130
"""The user pressed Ctrl-C; a shell shows the same code for SIGINT."""

CLOSED_PIPE = 141
"""The reader of the program's output, such as `head`, has ended; a shell shows the same code for SIGPIPE."""

DIFFERENT = 1
"""`saccade replay`: the result of a step differs from the recording."""

CANNOT_REPLAY = 2
"""`saccade replay`: the recording cannot be replayed here."""
