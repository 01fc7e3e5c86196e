"""Several processes of one gateway: what they share through an indexer, and what they ask each other."""
