"""Use of the operating system: signals, child processes, memory, and files that are either complete or absent."""
