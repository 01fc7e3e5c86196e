"""Bounds on what requests may hold: places, turns on the event loop, bytes."""
