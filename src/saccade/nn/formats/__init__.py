"""Formats of quantised weights: a weight's tensors in a checkpoint, and their values."""
