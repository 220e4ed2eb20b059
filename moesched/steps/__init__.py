"""The API of policies: the plan of a run, memories and pools, and the verbs of a prefill or decode step."""
