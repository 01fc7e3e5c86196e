"""Whether what only a GPU can run gives the results of plain PyTorch there, and how long it takes. Never run yet."""
