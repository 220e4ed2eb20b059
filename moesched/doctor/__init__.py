"""Examines this machine: says what will work, and gives a remedy for what will not."""
