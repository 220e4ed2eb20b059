"""The planner: finds the policy and the sizes of batch and micro-batches that give a model the most tokens per second.

First the search of MoE-Lightning gives each policy's best sizes and an upper bound on its throughput, which assumes
that lanes overlap perfectly. Then the schedules themselves are simulated on the virtual clock, the most promising
first, until no remaining bound comes near the best result.
"""
