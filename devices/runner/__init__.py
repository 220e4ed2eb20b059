"""The runner: runs the verb of a task by kernels of the table. Devices of torch and MLX share it."""
