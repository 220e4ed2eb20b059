"""CURVE, ZeroMQ's encryption: the keys of nodes, and who is let in."""
