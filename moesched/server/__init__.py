"""The server: one process speaks HTTP, another one runs the model; a pipe joins them."""
