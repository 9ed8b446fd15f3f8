"""A server that already runs. `engine` keeps the promise; the others translate what that server speaks."""
