"""Runs: one batch through one policy, on hardware or on the virtual clock, to a report."""
