"""Tensor parallelism: one process per rank. Rank 0 computes in the engine's process and starts the others.

The engine's process sends every rank the same messages in the same order (`messages`). Each rank executes them on its
part of the network, and the ranks meet in the collectives of nn.parallel. An image's pixels are in memory that all
processes mapped at start (`arena`). No rank recovers: one that fails or dies ends the engine's process, and the front
starts the engine again.
"""
