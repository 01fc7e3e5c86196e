"""Cache events of other engines, in our keys."""
