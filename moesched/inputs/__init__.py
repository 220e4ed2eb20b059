"""User input: models, machines, policies and workloads by name, prompts, and options."""
