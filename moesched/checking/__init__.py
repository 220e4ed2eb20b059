"""Checks of the engine and of policies: every transition, and values that tell where they came from."""
