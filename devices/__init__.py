"""Devices: what runs kernels and copies. One folder for each library; found by name through entry points."""
