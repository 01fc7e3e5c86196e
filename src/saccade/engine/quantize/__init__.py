"""Writes copies of checkpoints with rounded weights, in the format of compressed-tensors."""
