"""Parts that several devices use: reading pages from files, quantised weights, exchanges of nodes, token checks."""
