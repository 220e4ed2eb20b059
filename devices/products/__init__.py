"""Products by weights in plain, packed or coded blocks in torch, and the number of cores that such products use."""
