"""Equal bits and tokens: against Hugging Face, between policies, between processes, between commits."""
