"""Tables of the documentation, written from the result files: `make pages`."""
