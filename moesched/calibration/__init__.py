"""Measures this machine, and writes the measured rates and costs to a machine file."""
