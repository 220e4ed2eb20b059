"""Code that several devices share: reads of pages, quantised weights, exchanges between nodes, checks of token ids."""
