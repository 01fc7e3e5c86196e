"""Grammars of requests: read from their fields, tried in a limited child, and kept."""
