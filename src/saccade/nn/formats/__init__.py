"""Formats of quantised weights: what a checkpoint stores for one weight, and the values that it stands for."""
