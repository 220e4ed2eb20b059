"""Drivers run the engine: on a virtual clock, or on real hardware."""
