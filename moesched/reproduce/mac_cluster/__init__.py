"""Reproduction of "expert parallelism on Apple silicon" (RACS 2024): the paper's tables and figures, simulated."""
