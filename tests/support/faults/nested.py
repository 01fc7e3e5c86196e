"""Bytes that are well-formed msgpack, and nested more deeply than any decoder follows."""

DEPTH = 100_000

NESTED = b"\x91" * DEPTH + b"\xc0"
"""Arrays of one element."""

NESTED_COMMAND = b"\x83\xa4type\xa5abort\xaarequest_id\xa1r\xa5extra" + NESTED
"""An Abort with a field of a later version."""

NESTED_STEP = b"\x9f\x90\x90\xc0\x90" + NESTED + b"\xc0" * 10
"""A StepFrame with elements of a later version."""

NESTED_EVENTS = b"\x96\x01\x90\xc3\xc3" + NESTED + b"\xc0"
"""A KvEvents with elements of a later version."""
