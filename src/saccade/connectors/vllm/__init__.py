"""Servers of vLLM."""
