"""Expert parallelism on Apple silicon (RACS 2024): its tables and figures, simulated."""
