"""Devices, which run kernels and copies: one folder for each library; found by name through entry points."""
