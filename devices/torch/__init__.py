"""The torch devices: they run batches on the CPU, or on CUDA devices, of which each rank has one."""
