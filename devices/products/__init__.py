"""Matrix products by weights in blocks, by torch or by the CPU expert kernel."""
