"""A deterministic fake model for tests and demonstrations. `engine` implements the interface."""
