"""KV state as the core counts it: blocks, snapshots, and the references to them."""
