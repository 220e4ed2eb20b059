"""Analyses runs and machines: compares runs, explains their time, replays them with changes, and computes rooflines."""
