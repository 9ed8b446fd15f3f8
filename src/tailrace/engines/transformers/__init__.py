"""Hugging Face transformers: any causal model, also one that reads images. `engine` implements the interface; the
other modules are its parts."""
