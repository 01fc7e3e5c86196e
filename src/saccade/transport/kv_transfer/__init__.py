"""Transfers KV state between two engines, through shared memory on one host and over TCP otherwise. No torch."""
