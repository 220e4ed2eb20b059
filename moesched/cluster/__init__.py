"""Clusters: several nodes, each its own process, that run one model together."""
