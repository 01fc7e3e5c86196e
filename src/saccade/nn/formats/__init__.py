"""Formats of quantised weights: which tensors a checkpoint has for a weight, and what values they stand for."""
