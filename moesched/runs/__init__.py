"""Runs: each takes one batch through one policy, on hardware or on the virtual clock, and returns a report."""
