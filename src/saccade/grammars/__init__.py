"""Grammars that answers must match: what of a JSON schema is held, how a grammar is compiled, a model's vocabulary."""
