"""The chat in the terminal. It uses servers only over HTTP, and imports no server code."""
