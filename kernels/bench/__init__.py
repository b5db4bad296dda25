"""The benchmark of the norms alone: `python -m kernels.bench`, on a GPU."""
