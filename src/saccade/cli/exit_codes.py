"""What the `saccade` program returns to its caller."""

ERROR = 1
"""A setting, a file or the machine is wrong."""

USAGE = 2
"""The command line is wrong."""

TOLD = (ERROR, USAGE)
"""With these the program has printed what was wrong, so that its parent need not."""
