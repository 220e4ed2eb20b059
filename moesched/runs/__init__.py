"""Runs: a policy runs batches, or requests that join and leave, on hardware or on the virtual clock."""
