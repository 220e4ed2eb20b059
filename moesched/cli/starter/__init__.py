"""Templates that `moesched new-policy` copies under another name: a policy, and its test as text."""
