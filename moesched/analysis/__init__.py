"""Analysis of runs and machines: comparisons, replays, rooflines."""
