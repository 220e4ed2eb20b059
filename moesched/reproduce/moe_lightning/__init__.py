"""Reproduction of MoE-Lightning (Cao et al., ASPLOS 2025): the paper's tables and figures, simulated."""
