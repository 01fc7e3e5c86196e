"""Decide what each step computes: requests, sequences, the scheduler, KV blocks and pictures. No torch, no tensors."""
