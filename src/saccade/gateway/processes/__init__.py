"""Several processes of one gateway: what they share by an indexer, and what they ask each other."""
