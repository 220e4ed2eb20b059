"""The runner, which the torch and MLX devices share: runs tasks with kernels from the kernel table."""
