"""Damage, kills, signals, leaks, random programs: nothing hangs, nothing is wrong, nothing is left behind."""
