"""Clusters: several nodes, each a process of its own, that run one model together."""
