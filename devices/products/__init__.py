"""Products in torch with weights in plain, packed or quantised blocks, and the number of cores that they use."""
