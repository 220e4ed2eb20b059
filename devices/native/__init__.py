"""Kernels in C for few rows on the CPU; plain shared library, called through ctypes."""
