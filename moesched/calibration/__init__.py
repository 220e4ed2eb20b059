"""Measuring this machine into a machine file."""
