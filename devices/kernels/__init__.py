"""Kernels: the table that chooses one for each operation, and the rows of that table."""
