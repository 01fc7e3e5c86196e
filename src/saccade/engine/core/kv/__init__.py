"""The core's accounts of KV state: blocks, checkpoints, and references to them."""
