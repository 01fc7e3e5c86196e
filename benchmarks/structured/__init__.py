"""Structured output: whether what ends by itself is valid, and what masks cost."""
