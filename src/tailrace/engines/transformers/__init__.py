"""Hugging Face transformers: any causal model. `engine` keeps the promise; the others are its parts."""
