"""Processes of this machine that Saccade starts: tied to their parent, ended within a limit, restarted."""
