"""Attention of vision towers by AMX, compiled by Numba. Optional: only the registry of backends names it."""
