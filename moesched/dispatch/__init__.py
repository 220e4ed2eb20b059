"""The kit of policy authors: expert latencies, placement, popularity, caches, and the makespan of a layer."""
