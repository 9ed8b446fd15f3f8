"""The wires of libraries for front ends: the AI SDK's UI message stream, and AG-UI."""
