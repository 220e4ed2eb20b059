"""Everything that has a bar on a machine with an NVIDIA GPU, in one command: `python -m benchmarks.gpu.gpu_hour`."""
