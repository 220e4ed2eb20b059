"""Continuous batching: requests join and leave between steps, with the same policies that run fixed batches."""
