"""Examination of this machine: what will work, and a remedy for what will not."""
