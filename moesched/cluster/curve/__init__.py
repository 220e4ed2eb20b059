"""CURVE, ZeroMQ's encryption: the keys of nodes, and the admission of peers."""
