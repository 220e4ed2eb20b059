"""The runner: runs the verb of a task by kernels of the kernel table. The devices of torch and MLX share it."""
