"""Jobs: from names and files to a report."""
