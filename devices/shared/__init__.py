"""Parts that several devices use: reading pages from files, coded weights, exchanges between nodes, checks of prompts."""
