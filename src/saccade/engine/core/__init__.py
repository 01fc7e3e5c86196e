"""Decide what each step computes: requests, sequences, the scheduler, KV blocks and images. No torch, no tensors."""
