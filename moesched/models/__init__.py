"""Models: shapes, checkpoints and how their weights are cut into pages."""
