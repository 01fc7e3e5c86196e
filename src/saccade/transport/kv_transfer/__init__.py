"""Transfers KV state between two engines: on one host through shared memory, else over TCP. Needs no torch."""
