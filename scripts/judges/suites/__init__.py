"""The judges, one a module."""
