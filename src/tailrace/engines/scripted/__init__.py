"""A model whose every token is known beforehand, for tests and demonstrations. `engine` keeps the promise."""
