"""The kit for engines: what several engines share, also those of other packages (docs/extending.md). The server imports
none of it, and most of it imports numpy.

Rule: of the core it imports only the interface of engines, and what is below engines.
"""
