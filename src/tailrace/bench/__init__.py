"""Measures what the server adds to the engine, and what it can carry by itself."""
