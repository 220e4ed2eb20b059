"""Models: their shapes, checkpoints, operations, and the pages their weights are cut into."""
