"""The same model with other programs, in turn: `python -m benchmarks.peers.against_peers`."""
