"""Judges: tests that others wrote and packages ship, run against Saccade."""
