"""Attention of vision towers with AMX, compiled by Numba. It is optional: only the registry of backends mentions it."""
