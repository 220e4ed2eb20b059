"""The devices, which run kernels and copy data, one folder for each; moesched finds them by entry points."""
