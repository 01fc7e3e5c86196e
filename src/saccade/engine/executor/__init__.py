"""Compute steps: the network, its caches, the sampler. Works on steps as values, without sequences or a scheduler."""
