"""Decides which worker serves a request, from what is known about the workers and their caches."""
