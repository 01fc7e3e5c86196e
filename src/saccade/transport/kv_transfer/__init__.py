"""Transfers KV state between two engines: over shared memory on one host, over TCP between hosts. No torch."""
