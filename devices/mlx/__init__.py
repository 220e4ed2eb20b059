"""The MLX device, for machines with one memory, such as Apple silicon."""
