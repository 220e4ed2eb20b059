"""Models in GGUF files, the files of llama.cpp."""
