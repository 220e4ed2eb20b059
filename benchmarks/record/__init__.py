"""The options, the result file and the claims that all benchmarks share. Not a part of what they measure."""
