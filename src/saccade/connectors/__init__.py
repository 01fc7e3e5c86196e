"""Clients for every kind of worker."""
