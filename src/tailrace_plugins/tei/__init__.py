"""The wire of Text Embeddings Inference."""
