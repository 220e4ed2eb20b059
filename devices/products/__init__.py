"""Products by weights in plain, packed or quantised blocks in torch, and the number of cores that these use."""
