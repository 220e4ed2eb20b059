"""Transports: each carries out collectives (all-reduce, broadcast, gather) between the ranks of a run."""
