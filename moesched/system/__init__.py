"""The operating system: signals, child processes, and files that are complete or not there."""
