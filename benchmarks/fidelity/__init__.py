"""Predictions beside measurements, papers and exhaustive searches."""
