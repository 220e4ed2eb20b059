"""The torch devices: batches on the CPU, or on one CUDA device for each rank."""
