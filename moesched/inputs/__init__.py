"""What users name and give: models, machines, policies and workloads by name, and prompts."""
