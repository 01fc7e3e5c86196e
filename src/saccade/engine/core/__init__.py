"""Decides what each step computes: requests, sequences, the scheduler, KV blocks and images. Has no tensors."""
