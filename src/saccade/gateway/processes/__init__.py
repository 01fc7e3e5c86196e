"""Several processes of one gateway: what they share through an indexer, and what they ask each other.

Other rooms use `Siblings`, and `indexer.serve` for the process that follows the workers' caches.
"""
