"""The core's bookkeeping of KV state: blocks, checkpoints, and references to them."""
