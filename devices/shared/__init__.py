"""Parts that several devices use: reading pages from files, coded weights, exchanges of nodes, checks of prompts."""
