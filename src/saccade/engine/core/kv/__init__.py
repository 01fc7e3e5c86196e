"""KV state as the core counts it: blocks, checkpoints, and the references to them."""
