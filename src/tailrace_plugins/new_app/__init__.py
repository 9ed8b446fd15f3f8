"""`tailrace new`: copies an example, to start from."""
