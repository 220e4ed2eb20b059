"""The lagging device: tests the CUDA device's code on the CPU, over imitated streams that lag, overtake and fail."""
