"""The wire of text-generation-inference."""
