"""The verbs of a model on kernels of a table: shared by torch and MLX, and knowing neither."""
