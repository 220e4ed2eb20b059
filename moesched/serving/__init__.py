"""Serving: requests that join and leave between steps, on the policies that run batches."""
