"""Times: of the engine, kernels, exchanges, decisions, commands, sweeps and pages."""
