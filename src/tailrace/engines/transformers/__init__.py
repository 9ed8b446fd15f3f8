"""Hugging Face transformers: any causal model. `engine` implements the interface; the other modules are its parts."""
