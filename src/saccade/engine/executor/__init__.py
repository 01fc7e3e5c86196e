"""Computes steps with the network, its caches and the sampler.

It gets each step as plain values, and knows neither sequences nor the scheduler.
"""
