"""The files that `moesched new-policy` writes, under another name: a policy, and its test as text."""
