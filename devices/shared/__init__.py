"""Parts that several devices use: reading pages from files, exchanges between nodes, checks of prompts."""
