"""Grammars that answers must match: which parts of a JSON schema they enforce, and how to compile them."""
