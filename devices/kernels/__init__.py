"""Kernels: each computes an operation of a model; a table chooses the kernel for each operation and case."""
