"""The lagging device: CUDA's code path on the CPU, over streams that lag, overtake each other and fail."""
