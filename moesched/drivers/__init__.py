"""Drivers: they resume policies' coroutines, run the tasks that the engine starts, and report their ends to the engine.

One driver uses a virtual clock, one real time. A third computes the times of a run from a few captured steps.
"""
