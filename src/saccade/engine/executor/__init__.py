"""Computes steps with the network, its caches and the sampler. Knows steps as values, but no sequences or scheduler."""
