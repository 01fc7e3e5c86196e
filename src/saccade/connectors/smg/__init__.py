"""Clients for workers of SGLang and TokenSpeed, which speak SMG's wires."""
