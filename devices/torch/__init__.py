"""The torch devices: they run batches on the CPU, or on one CUDA device for each rank."""
