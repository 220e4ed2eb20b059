"""Policies: one file per scheduling idea."""
