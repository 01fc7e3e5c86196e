"""Translates the cache events of other engines to our keys."""
