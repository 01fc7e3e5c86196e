"""From a read request to an answer that a worker generates."""
