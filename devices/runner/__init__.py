"""The runner: runs a task by kernels of the kernel table, chosen for the task's verb (kind). Torch and MLX share it."""
