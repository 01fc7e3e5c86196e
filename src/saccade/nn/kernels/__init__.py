"""Loops over tensors' memory for CPUs, compiled by Numba: where torch would make many small passes."""
