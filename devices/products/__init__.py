"""Products by weights in plain, packed or quantized blocks in torch, and the number of cores that these use."""
