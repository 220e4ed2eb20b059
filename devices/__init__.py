"""Devices: what runs kernels and copies. Each file is one device; found by name through entry points."""
