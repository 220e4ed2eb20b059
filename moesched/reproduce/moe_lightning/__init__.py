"""MoE-Lightning (Cao et al., ASPLOS 2025): its tables and figures, simulated."""
