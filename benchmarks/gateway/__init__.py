"""Saccade's gateway and SMG, the Rust gateway, in turn in one run, each in front of a worker that only takes notes."""
