"""Sweeps: simulations of all combinations of policies, machines, models, workloads and settings; see docs/sweeps.md."""
