"""Policies: each file has one scheduling idea, as a class with a plan and methods for prefill and decode."""
