"""Saccade's own workers."""
