"""Parts that several devices use: reading pages from files, quantized weights, exchanges of nodes, token checks."""
