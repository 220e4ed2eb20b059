"""Models, runs, processes and limits that several benchmarks and tests use."""
