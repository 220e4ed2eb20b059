"""Clusters: several nodes, each its own process, run one model together.

The launcher is the process that the user starts: it starts the nodes, gives them prompts, and collects their results.
"""
