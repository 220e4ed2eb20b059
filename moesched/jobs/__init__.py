"""Jobs: whole runs and predictions, from names and files to a report."""
