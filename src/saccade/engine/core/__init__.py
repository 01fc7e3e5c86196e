"""Decides what each step computes. It has requests, sequences, the scheduler, KV blocks and images, but no tensors."""
