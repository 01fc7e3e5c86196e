"""From the deltas of a worker to the text, reasoning and calls of an answer."""
