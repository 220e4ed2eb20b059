"""The lagging device: runs the CUDA device's code on the CPU for tests, on imitated streams that are late or fail."""
