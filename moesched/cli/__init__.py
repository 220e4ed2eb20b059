"""The command line: `moesched run`, `moesched simulate` and the others, one file per group of commands."""
