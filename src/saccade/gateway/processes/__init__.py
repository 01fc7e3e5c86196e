"""Several processes of one gateway: they share an index through an indexer, and query each other.

Other packages use `Siblings`, and `indexer.serve` for the process that follows the workers' caches.
"""
