"""`tailrace top`: what a server does, live in a terminal."""
