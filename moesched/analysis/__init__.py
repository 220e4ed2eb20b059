"""What is said of a run or of a machine: comparisons, replays, rooflines."""
